"""A method of one file trains through everything that the kit has, and no file of it knows it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from pyarrow import Table, parquet

from launcher.cli import cookbook
from launcher.recipe import entries
from runspec.prepared import COMPONENT as PREPARED
from tests.trainer.methods.pairs import pairs_config, write_pairs
from tests.trainer.methods.toy_objective import PreferFirst, ToyConfig
from tests.trainer.runs import ROOT, lora_model, metrics
from trainer.config import parse, read_yaml
from trainer.data.preview import previews

TOY = "tests.trainer.methods.toy_objective"
MODULE = f"trainer.train {TOY}:ToyConfig"
LORA = lora_model(lora_dropout=0.0)
PACKED_LENGTH = 96


@pytest.fixture(scope="module", autouse=True)
def allowed():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COOKBOOK_COMPONENTS", TOY)
        yield


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    return write_pairs(path, ("question", "first", "second"), weight=lambda i: 1.0 + i % 2)


def config(folder: Path, model_folder: Path, pairs: Path, **changes: Any) -> Path:
    return pairs_config(folder, model_folder, pairs, f"{TOY}.Pairs", **changes)


def test_a_prepared_set_of_pairs_is_read_by_the_methods_component(tmp_path, model_folder, pairs):
    folder = tmp_path / "prepared/mine/1/data/train"
    folder.mkdir(parents=True)
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    parquet.write_table(Table.from_pylist(rows), folder / "part-0.parquet")
    (folder.parents[1] / "card.json").write_text(json.dumps({"format": "preference"}))
    content = read_yaml(config(tmp_path / "run", model_folder, pairs)) | {"dataset_val": None}
    del content["run_val_every_n_steps"]
    content["dataset"] = {"_component_": PREPARED, "data_dir": str(folder)}
    (found,), faults = previews(parse(content, ToyConfig), 1, PreferFirst.form)
    assert faults == [] and [each["document"] for each in found["shown"]] == [[1, 2], [2, 2]]
    trained = [span["text"] for each in found["shown"] for span in each["spans"][1:]]
    assert trained == [" Yes, it is fast.<|end|>", " No.<|end|>"]
    _, (fault,) = previews(parse(content), 1)
    assert "contains preference pairs, which this method does not train on" in fault


@pytest.mark.long
def test_it_is_submitted_by_one_row_of_the_table(tmp_path, model_folder, pairs, monkeypatch):
    """By cookbook submit --local: the real job script, torchrun and two ranks."""
    monkeypatch.setitem(entries.rows(), "toy_objective", entries.method(MODULE, ToyConfig))
    monkeypatch.setenv("COOKBOOK_ROOT", str(tmp_path / "shared"))
    content = yaml.safe_load(config(tmp_path / "own", model_folder, pairs, model=LORA).read_text())
    del content["output_dir"]
    resources = {"nodes": 1, "gpus_per_node": 2, "cpus_per_gpu": 1, "time": "00:10:00"}
    content |= {"entry": "toy_objective", "resources": resources, "max_steps": 2}
    content["tokenizer"]["max_seq_len"] = 64
    recipe = tmp_path / "toy.yaml"
    recipe.write_text(yaml.safe_dump(content))

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(cookbook, arguments)

    def said(result: Result) -> str:
        return result.output + str(result.exception)

    for model in ([], _WITHOUT_LORA):
        options = ("--gpu", "h100-80", "--trace", "--json")
        estimated = run("estimate", str(recipe), *options, *model)
        assert estimated.exit_code == 0, said(estimated)
        found = json.loads(estimated.stdout)
        assert found["traced"]["weights"] > (1.5 if model else 0) * 4 * found["parameters"] / 2
    refused = run("check", str(recipe), "--local", "hinge=11")
    assert refused.exit_code == 1 and "hinge: must be at most 10" in said(refused)
    unknown = run("check", str(recipe), "hing=1")
    assert "unknown key 'hing' (did you mean hinge?)" in said(unknown)
    other = run("check", str(recipe), "--local", "dataset._component_=torchtune.datasets.x")
    assert other.exit_code == 1 and "torchtune.datasets" in said(other)
    shown = run("check", str(recipe), "--local", "--samples", "1")
    assert "document 1 of 2" in said(shown) and "[[ Yes, it is fast." in said(shown)
    done = run("submit", str(recipe), "--local", "--watch", "hinge=0.5")
    assert done.exit_code == 0, said(done)
    (folder,) = (tmp_path / "shared/runs").glob("*-toy-*")
    assert json.loads((folder / "progress.json").read_text())["state"] == "finished"
    first = metrics(folder)[0]
    assert first["margin"] == 0.0 and first["loss"] == 0.5 * first["weight"]
    assert (folder / "export/adapter/adapter_model.safetensors").is_file()


_WITHOUT_LORA = [f"~model.{key}" for key in LORA if key.startswith("lora_")]


# What the worked examples of CONTRIBUTING.md have added.
ADDED = """
from types import SimpleNamespace
import torch
from launcher.recipe import entries
from launcher.recipe.model import Resources
from launcher.slurm.render import template
from my_adapters import BlockScale
from plugins.engines.schema import SCHEMAS, unknown
from runspec.adapters import declared
from runspec.keys.methods import config_class
from trainer.methods.base import named
from trainer.methods.preference_losses import LOSSES, Answers

method = named(config_class("unlikelihood").objective)
assert method.config_class.own_keys().keys() == {"alpha"}
dpo = config_class("dpo")
assert LOSSES.keys() == set(dpo.keys()["loss"].choices)
assert dpo.reference_of({"loss": "cpo"}) == ""
answers = Answers(torch.tensor([[-1.0, -3.0]]), torch.zeros(1, 2), torch.ones(1, 2))
config = SimpleNamespace(beta=0.5)
(loss,), rewards = LOSSES["cpo"].of(answers, config)
assert rewards.tolist() == [[-0.5, -1.5]] and abs(loss - 0.3133) < 1e-4
assert declared("my_adapters.BlockScale") == BlockScale.declared
assert BlockScale({"scale_init": 0.5}).first_value(None, "", (2,), None).tolist() == [0.5, 0.5]
assert entries.find("mytrainer:own.yaml").title == "MyTrainer"
assert unknown({"lr": 1, "lrr": 2}, SCHEMAS["mytrainer"]("", {})) == {"lrr": "lr"}
resources = Resources.of({"licenses": "matlab:2"})
text = template("parts/options.j2").render(resources=resources)
assert text.splitlines() == ["#SBATCH --licenses=matlab:2"]
"""


def test_the_worked_examples_of_contributing_can_be_applied(tmp_path):
    for folder in ("launcher", "plugins", "runspec", "templates", "trainer"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for found in re.findall(r"  ```diff\n(  diff .*?)  ```\n", text, re.DOTALL):
        given = re.sub("^  ", "", found, flags=re.MULTILINE)
        subprocess.run(["git", "apply"], cwd=tmp_path, input=given, text=True, check=True)
    arguments = "import dataclasses\n\n@dataclasses.dataclass\nclass Arguments:\n    lr: float\n"
    (tmp_path / "mytrainer").mkdir()
    (tmp_path / "mytrainer" / "config.py").write_text(arguments)
    own = os.environ | {"PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-P", "-c", ADDED], env=own, check=True)
