"""The shipped descriptions are what the models are today, and say what the trainer's check says."""

import importlib.metadata
import json
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher.cli import cookbook
from launcher.recipe import load as recipes
from plugins.estimate.launcher.shapes import families, support
from runspec.description import PUBLISHED, SHIPPED, Subject
from runspec.files import read_json
from runspec.shape import Attention, Shape, Vector
from tests.trainer.models.family_matrix import FAMILIES, row
from tests.trainer.models.test_toy_decoder import MODULE, TOY
from trainer.describe import main, of_block, subjects

VERSIONS = {"transformers": importlib.metadata.version("transformers")}
# One of each source, with what few have: scaled rotary tables, experts, latents, linear attention.
QUICK = ("Llama-3.2-1B", "gpt-oss-20b-BF16")
QUICK_FAMILIES = ("deepseek-v3",)


@cache
def shipped() -> dict[str, Subject]:
    return {subject.file_name: subject for subject in subjects([])}


def marked(names, quick):
    return [pytest.param(n, marks=[pytest.mark.long] * (not n.startswith(quick))) for n in names]


@pytest.mark.parametrize("name", marked(sorted(p.name for p in SHIPPED.iterdir()), QUICK))
def test_a_shipped_description_is_of_todays_packages(name):
    """If not: python -m trainer.describe"""
    subject = shipped()[name]
    assert of_block(subject.model, subject.folder) == Shape.of(read_json(SHIPPED / name)["shape"])
    assert subject.find(SHIPPED, lambda name, version: VERSIONS[name] == version) is not None


def test_every_recipe_and_published_model_is_described(tmp_path):
    wanted = {name for name, subject in shipped().items() if subject.file}
    for name in recipes.names():
        recipe = recipes.load(name)
        if recipe.entry.method:
            config = recipe.resolved(tmp_path, "run")
            folder = Path(config["checkpointer"]["checkpoint_dir"])
            wanted.add(Subject(config.get("model") or {}, folder).file_name)
    assert wanted <= {path.name for path in SHIPPED.iterdir()}


@pytest.mark.parametrize("family", marked(FAMILIES, QUICK_FAMILIES))
def test_support_is_what_the_trainers_check_says(family, tmp_path, model_folder, dataset):
    source, found = row(family, tmp_path, dataset, model_folder)
    assert support(of_block({}, source)) == found


def test_the_command_lists_families_and_says_why_not():
    def said(*words: str) -> str:
        done = CliRunner().invoke(cookbook, ["models", *words])
        return done.output + (str(done.exception) if done.exception else "")

    listed = said().splitlines()
    assert listed[0].split()[:5] == ["MODEL", "TYPE", "FULL", "LORA", "DORA"]
    assert len(listed) == len(families()) + 3
    assert {kind for kind, _ in FAMILIES.values()} <= families().keys()
    text = said("gpt_oss")
    assert "expert_parallel   yes" in text and "tensor_parallel   yes" in text
    assert "model.lora_modules=[k_proj,o_proj,q_proj,v_proj]" in text
    assert said("gemma3") == said("gemma3_text")
    assert "did you mean qwen3?" in said("qwen33")


def test_a_model_of_ones_own_is_described(monkeypatch):
    """Its attention is no module, and its MLP has no gate."""
    monkeypatch.setenv("COOKBOOK_COMPONENTS", MODULE)
    shape = of_block(TOY | {"lora_rank": 4}, None)
    (block,) = shape.kinds
    assert list(block.matrices) == ["mix", "query", "key", "value", "back", "up", "down"]
    assert [name for name, _ in block.of("mlp")] == ["up", "down"]
    assert block.attention == Attention(4, 2, 16, 16, held=32)
    assert Vector(16, features=64) in block.vectors and block.matrices["up"].bias
    # Of torch's own norm nothing is rounded before its scale.
    assert shape.wide_norms and shape.order == (0, 0) and not shape.table


def test_the_command_prints_each_and_names_faults(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "jamba"}')
    qwen = PUBLISHED / "Qwen2.5-0.5B-Instruct"
    assert main([f"{qwen}.json", str(tmp_path), "torch.nn.Linearr"]) == 1
    out, err = capsys.readouterr()
    assert Shape.of(json.loads(out)) == of_block({}, qwen)
    assert f"error: {tmp_path.name}: checkpointer.checkpoint_dir: the jamba model cannot" in err
    assert "torch.nn has no Linearr (did you mean Linear?)" in err
    assert main(["--into", str(tmp_path / "kept"), f"{qwen}.json"]) == 0
    (kept,) = (tmp_path / "kept").iterdir()
    assert kept.read_text() == (SHIPPED / kept.name).read_text()
