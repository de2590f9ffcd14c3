"""A method of one file trains through everything that the kit has, and no file of it knows it."""

import json
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from pyarrow import Table, parquet
from safetensors.torch import load_file

from launcher.cli import cookbook
from launcher.recipe import entries
from tests.trainer.methods.pairs import pairs_config, write_pairs
from tests.trainer.methods.toy_objective import PreferFirst, ToyConfig
from tests.trainer.runs import (
    ROOT,
    assert_same_curve,
    curve,
    finish,
    kill_at,
    lora_model,
    metrics,
    reopen,
    start,
    write_config,
)
from trainer.config import parse, read_yaml
from trainer.data import batches
from trainer.data.preview import previews
from trainer.data.source import PREPARED
from trainer.layers.batch import IGNORE_INDEX
from trainer.parallel import world as distributed

TOY = "tests.trainer.methods.toy_objective"
MODULE = f"trainer.train {TOY}:ToyConfig"
TEACHER = "trainer.train tests.trainer.methods.toy_teacher:ImitationConfig"
LORA = lora_model(lora_dropout=0.0)
PACKED_LENGTH = 96
# By name: ranks, the run that it equals, changes to the config.
RUNS: dict[str, tuple[int, str | None, dict[str, Any]]] = {
    "lora": (1, None, {"model": LORA}),
    "lora-packed": (1, None, {"model": LORA, "row_length": PACKED_LENGTH, "shuffle": False}),
    "lora-tensor": (2, "lora", {"model": LORA, "tensor_parallel_dim": 2}),
    "full": (1, None, {}),
    "full-fsdp": (2, "full", {"batch_size": 2, "gradient_accumulation_steps": 2}),
    "qdora": (1, None, {"model": LORA | {"use_dora": True, "quantize_base": True}}),
}


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


@pytest.fixture(scope="module")
def root(tmp_path_factory, model_folder, pairs):
    """The folder in which every run lies by its name."""
    folder = tmp_path_factory.mktemp("toy")
    for name, (ranks, _, changes) in RUNS.items():
        path = config(folder / name, model_folder, pairs, **changes)
        output = finish(start(path, ranks, module=MODULE))
        frozen = "frozen, " if name.startswith("full") else "the policy with its adapter off"
        assert f"reference  {frozen}" in output
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_it_begins_at_its_reference_and_learns(name, root):
    first, *_, last = metrics(root / name)
    assert first["margin"] == first["pairs/preferred"] == 0.0, "policy and reference are the same"
    assert first["loss"] == first["weight"] > 1
    assert last["margin"] > 0.05 and last["loss"] < first["loss"]
    assert last["val_margin"] > 0 and 0 < last["val_pairs/preferred"] <= 1
    assert last["val_loss"] < 1.5


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, (_, wanted, _) in RUNS.items() if wanted])
def test_every_layout_equals_the_single_process(name, root):
    wanted = root / str(RUNS[name][1])
    assert_same_curve(root / name, wanted, 2e-5, 1e-4)
    for own, other in zip(metrics(root / name), metrics(wanted), strict=True):
        assert own["margin"] == pytest.approx(other["margin"], abs=2e-5)
        assert own.get("val_margin") == pytest.approx(other.get("val_margin"), abs=2e-5)


def test_a_packed_row_holds_whole_pairs(model_folder, pairs, tmp_path):
    changes = {"row_length": PACKED_LENGTH, "batch_size": 2}
    path = config(tmp_path / "packed", model_folder, pairs, **changes)
    world = distributed.start("cpu")
    try:
        data = batches.build(parse(read_yaml(path), ToyConfig), world, PreferFirst.form)
        (batch,) = next(data.training.from_step(0))
    finally:
        distributed.stop()
    rows = data.training.rows
    assert len(rows) < len(rows.samples) and rows.samples.documents.max() <= PACKED_LENGTH // 2
    assert batch.documents_per_sample == 2 and len(batch.lengths) == 2 * batch.sample_count
    tokens, labels = batch.inputs.tokens.flatten(), batch.labels.flatten()
    # Padding is a document of the mask, too.
    own = [
        (begin, end)
        for begin, end in pairwise(batch.inputs.documents.cu_seqlens.tolist())
        if (labels[begin:end] != IGNORE_INDEX).any()
    ]
    assert [end - begin for begin, end in own] == list(batch.lengths)
    for (first, _), (second, _) in zip(own[::2], own[1::2], strict=True):
        assert tokens[first : first + 5].equal(tokens[second : second + 5]), "one question"
    for position, document in zip(batch.trained, batch.document_index, strict=True):
        begin, end = own[document]
        assert begin <= position < end - 1
    assert set(batch.numbers.tolist()) <= {1.0, 2.0} and len(batch.numbers) == batch.sample_count


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
def test_an_adapter_that_training_goes_on_from_is_in_the_reference(
    root, tmp_path, model_folder, pairs
):
    adapter = root / "lora/export/adapter/adapter_model.safetensors"
    own = {"checkpoint_dir": str(model_folder), "adapter_checkpoint": str(adapter)}
    changes = {"model": LORA, "checkpointer": own, "max_steps": 2, "batch_size": 4}
    path = config(tmp_path, model_folder, pairs, **changes)
    assert "reference  frozen, " in finish(start(path, 2, module=MODULE))
    first, last = metrics(tmp_path)
    assert first["margin"] == 0.0 < last["margin"]
    # Of the model with its adapter off the policy is no longer the same.
    assert first["loss"] == first["weight"]


@pytest.mark.long
def test_a_killed_run_resumes_the_same(tmp_path, model_folder, pairs):
    changes = {"max_steps": 30, "epochs": 40, "row_length": PACKED_LENGTH, "batch_size": 2}
    killed, whole = (
        config(tmp_path / name, model_folder, pairs, **changes) for name in ("killed", "whole")
    )
    finish(start(whole, module=MODULE))
    kill_at(killed, 5, module=MODULE)
    content = yaml.safe_load(killed.read_text())
    killed.write_text(yaml.safe_dump(content | {"hinge": 2.0}))
    refused = finish(start(killed, attempt=1, module=MODULE), status=None)
    assert "hinge may not change at resume" in refused
    killed.write_text(yaml.safe_dump(content))
    assert "resuming from checkpoints/step_" in finish(start(killed, attempt=2, module=MODULE))
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
    tensors = [load_file(tmp_path / n / "export/model.safetensors") for n in ("killed", "whole")]
    assert all(tensors[0][key].equal(tensor) for key, tensor in tensors[1].items())


@pytest.mark.long
def test_a_teacher_comes_from_another_folder(root, tmp_path, model_folder, dataset):
    teacher = root / "full/export"
    names = {"one": {}, "fsdp": {"batch_size": 4}, "tensor": {"tensor_parallel_dim": 2}}
    for name, changes in names.items():
        changes = {"teacher_dir": str(teacher), "max_steps": 4, **changes}
        changes["optimizer"] = {"_component_": "torch.optim.AdamW", "lr": 3e-4}
        path = write_config(tmp_path / name, model_folder, dataset, **changes)
        output = finish(start(path, 1 if name == "one" else 2, module=TEACHER))
        assert "teacher    frozen, " in output
        assert_same_curve(tmp_path / name, tmp_path / "one", 2e-4)
    lines = metrics(tmp_path / "one")
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]
    path = tmp_path / "one/train.yaml"
    content = read_yaml(path)
    for attempt, (folder, status) in enumerate({"full": 0, "lora": None}.items(), 1):
        shutil.copytree(root / folder / "export", tmp_path / folder)
        path.write_text(yaml.safe_dump(content | {"teacher_dir": str(tmp_path / folder)}))
        reopen(tmp_path / "one")
        said = finish(start(path, attempt=attempt, module=TEACHER), status)
    # The same weights under another name went on; others do not.
    assert "teacher_weights may not change at resume" in said


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

    for model in ([], ["model._component_=torchtune.models.llama3.llama3", *_WITHOUT_LORA]):
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


_WITHOUT_LORA = [f"~model.{key}" for key in LORA if key.startswith(("lora_", "apply_lora"))]


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
