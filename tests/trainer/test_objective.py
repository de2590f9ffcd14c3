"""A method of one file trains through everything that the kit has, and no file of it knows it."""

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from launcher.cli import cookbook
from launcher.recipes import entries
from runspec.keys.common import COMMON
from runspec.keys.sft import SFT
from tests.trainer.runs import (
    ROOT,
    assert_same_curve,
    curve,
    finish,
    kill_rank,
    lora_model,
    metrics,
    start,
    wait_for_step,
    write_config,
)
from tests.trainer.toy_objective import Z_WEIGHT

MODULE = "tests.trainer.toy_objective"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    rows = [{"text": f"Node {i} is up, " + "very " * (i % 5) + "fast."} for i in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(folder: Path, model_folder: Path, texts: Path, **changes: Any) -> Path:
    standard = {
        "model": lora_model(lora_dropout=0.0),
        "max_steps": 6,
        "save_every_n_steps": 3,
        "data_cache_dir": str(folder.parent / "tokens"),
    }
    path = write_config(folder, model_folder, texts, **standard | changes)
    content = yaml.safe_load(path.read_text())
    content["dataset"] = {
        "_component_": "torchtune.datasets.text_completion_dataset",
        "source": "json",
        "data_files": str(texts),
        "split": "train",
    }
    path.write_text(yaml.safe_dump(content))
    return path


def test_it_trains_the_same_on_every_layout_resumes_and_exports(
    tmp_path: Path, model_folder: Path, texts: Path
) -> None:
    one = config(tmp_path / "one", model_folder, texts)
    finish(start(one, module=MODULE))
    for name, changes in (
        ("fsdp", {"batch_size": 4}),
        ("tensor", {"tensor_parallel_dim": 2}),
    ):
        path = config(tmp_path / name, model_folder, texts, **changes)
        finish(start(path, ranks=2, module=MODULE))
        assert_same_curve(tmp_path / name, tmp_path / "one", 1e-4)
    lines = metrics(tmp_path / "one")
    for own, other in zip(lines, metrics(tmp_path / "fsdp"), strict=True):
        assert own["z_loss"] == pytest.approx(other["z_loss"], rel=1e-4)
        assert own["loss"] == pytest.approx(own["cross_entropy"] + 1e-3 * own["z_loss"], rel=1e-5)
    # A mean over documents of many tokens each, which begins near the logarithm of the vocabulary.
    assert lines[0]["cross_entropy"] > 5 * math.log(1024)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert (tmp_path / "one/export/adapter/adapter_model.safetensors").is_file()

    killed = config(tmp_path / "killed", model_folder, texts, max_steps=40, epochs=40)
    whole = config(tmp_path / "whole", model_folder, texts, max_steps=40, epochs=40)
    finish(start(whole, module=MODULE))
    process = start(killed, module=MODULE)
    wait_for_step(killed, 7, process)
    kill_rank(process, 0)
    finish(process, status=None)
    assert "resuming from checkpoints/step_" in finish(start(killed, attempt=1, module=MODULE))
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
    tensors = [load_file(tmp_path / n / "export/model.safetensors") for n in ("killed", "whole")]
    assert all(tensors[0][key].equal(tensor) for key, tensor in tensors[1].items())


@pytest.mark.long
def test_it_is_submitted_by_one_row_of_the_table(
    tmp_path: Path, model_folder: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By cookbook submit --local: the real job script, torchrun and two ranks."""
    row = entries.Entry(
        COMMON | SFT | {"z_weight": Z_WEIGHT},
        entries.trainer_command(MODULE),
        checked="complete",
        objective=f"{MODULE}.NextTokenWithZLoss",
        can_estimate=True,
        resumes=True,
    )
    monkeypatch.setitem(entries.ENTRIES, "toy_objective", row)
    monkeypatch.setenv("COOKBOOK_ROOT", str(tmp_path / "shared"))
    monkeypatch.setenv("COOKBOOK_COMPONENTS", MODULE)
    content = yaml.safe_load(config(tmp_path / "own", model_folder, texts).read_text())
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

    estimated = run("estimate", str(recipe), "--gpu", "h100-80", "--trace", "--json")
    assert estimated.exit_code == 0, estimated.output + repr(estimated.exception)
    refused = run("check", str(recipe), "--local", "z_weight=2")
    assert refused.exit_code == 1 and "z_weight: must be at most 1" in said(refused)
    unknown = run("check", str(recipe), "z_wait=1")
    assert "unknown key 'z_wait' (did you mean z_weight?)" in said(unknown)
    done = run("submit", str(recipe), "--local", "--watch", "z_weight=0.5")
    assert done.exit_code == 0, done.output + repr(done.exception)
    (folder,) = (tmp_path / "shared/runs").glob("*-toy-*")
    assert json.loads((folder / "progress.json").read_text())["state"] == "finished"
    for line in metrics(folder):
        assert line["loss"] == pytest.approx(line["cross_entropy"] + 0.5 * line["z_loss"], rel=1e-5)
    assert (folder / "export/adapter/adapter_model.safetensors").is_file()


def test_no_file_of_the_kit_knows_it() -> None:
    found = subprocess.run(
        ["grep", "-rl", "--include=*.py", "-e", "z_loss", "-e", "toy_objective", "trainer"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert found.stdout == ""
