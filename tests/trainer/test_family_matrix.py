"""configs/families.yaml says what the trainer's check says; cookbook models shows it."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher import paths, yamlfile
from launcher.cli import cookbook
from tests.trainer.family_matrix import row
from tests.trainer.transformers_cases import FAMILIES

QUICK = ("deepseek-v3",)


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[pytest.mark.long] * (f not in QUICK)) for f in FAMILIES]
)
def test_the_trainer_says_the_same(family: str, tmp_path: Path, model_folder: Path, dataset: Path):
    assert row(family, tmp_path, dataset, model_folder) == yamlfile.load(paths.FAMILIES)[family]


def test_every_family_of_the_tests_is_listed():
    assert list(yamlfile.load(paths.FAMILIES)) == list(FAMILIES)


def test_the_command_lists_families_and_says_why_not():
    def said(*words: str) -> str:
        done = CliRunner().invoke(cookbook, ["models", *words])
        return done.output + (str(done.exception) if done.exception else "")

    listed = said().splitlines()
    assert listed[0].split()[:6] == ["FAMILY", "MODEL", "TYPE", "FULL", "LORA", "DORA"]
    assert len(listed) == len(FAMILIES) + 3
    told = said("gpt_oss")
    assert "expert_parallel   yes" in told and "tensor_parallel   yes" in told
    assert "did you mean qwen3?" in said("qwen33")
