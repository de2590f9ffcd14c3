"""Steps that are not finite, other models' tokenizers, the profiler, and how a rank ends."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.trainer.runs import ROOT, error_record, metrics, progress, train, write_config
from trainer import train as training
from trainer.config import load
from trainer.data.batches import build
from trainer.data.tokenizers import faults, hugging_face_tokenizer
from trainer.errors import ConfigError
from trainer.optimizers import warmup_note
from trainer.parallel import world as distributed
from trainer.profiling import profiler

BAD_STEP, PER_STEP = 2, 8
FUSED = {"_component_": "torch.optim.AdamW", "lr": 3e-3, "fused": True}
FOREACH = {"_component_": "torch.optim.AdamW", "lr": 3e-3, "fused": False}


def run_here(path: Path) -> int:
    """A start on one rank in this process; its exit status."""
    try:
        return training.main(["sft", str(path)])
    finally:
        distributed.stop()


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory, model_folder):
    """A model that does not know one word, data in which it occurs once, and data without it.

    The word's embedding is NaN, and its sample is the last of the second step: with two ranks the
    second rank's. `without` has all the samples but the second step's.
    """
    root = tmp_path_factory.mktemp("poisoned")
    rows = [{"question": f"What is number {i}?", "answer": "very " * (i % 7)} for i in range(40)]
    rows[BAD_STEP * PER_STEP - 1]["question"] += " ~"
    rest = rows[: (BAD_STEP - 1) * PER_STEP] + rows[BAD_STEP * PER_STEP :]
    for name, kept in (("with", rows), ("without", rest)):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    folder = root / "model"
    shutil.copytree(model_folder, folder)
    words = hugging_face_tokenizer(str(folder))
    bad = set(words.encode(rows[BAD_STEP * PER_STEP - 1]["question"]))
    bad -= {token for row in rest for text in row.values() for token in words.encode(text)}
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][sorted(bad)] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return {"model": folder, "with": root / "with.jsonl", "without": root / "without.jsonl"}


def pair(root: Path, poisoned: dict[str, Path], **changes: Any) -> list[Path]:
    """The configs of five steps with the bad one, and of the same steps without it."""
    return [
        write_config(
            root / name,
            poisoned["model"],
            poisoned[name],
            **{"shuffle": False, "max_steps": steps, "epochs": 1, "save_every_n_steps": 2}
            | changes,
        )
        for name, steps in (("with", 5), ("without", 4))
    ]


def assert_skipped(root: Path) -> None:
    """The bad step is counted and shown, no checkpoint is made of it, and nothing else differs."""
    lines, rest = metrics(root / "with"), metrics(root / "without")
    assert [line["skipped_steps"] for line in lines] == [0, 1, 1, 1, 1]
    bad = lines.pop(BAD_STEP - 1)
    assert bad["loss"] is None and bad["grad_norm"] is None
    for key in ("loss", "grad_norm", "lr"):
        assert [line[key] for line in lines] == [line[key] for line in rest]
    export = "export/model.safetensors"
    weights, wanted = (load_file(root / name / export) for name in ("with", "without"))
    for key, tensor in wanted.items():
        assert torch.equal(weights[key].nan_to_num(9.0), tensor.nan_to_num(9.0)), key
    assert sorted(p.name for p in (root / "with/checkpoints").iterdir()) == ["step_4", "step_5"]
    assert progress(root / "with")["skipped_steps"] == 1


@pytest.mark.parametrize(
    "optimizer", [pytest.param(FUSED, marks=pytest.mark.long), FOREACH], ids=["fused", "foreach"]
)
def test_a_step_that_is_not_finite_changes_nothing(optimizer, tmp_path, poisoned):
    for path in pair(tmp_path, poisoned, optimizer=optimizer):
        assert run_here(path) == 0
    assert_skipped(tmp_path)


@pytest.mark.long
def test_all_ranks_skip_what_one_has_seen_and_chosen_ranks_are_profiled(
    tmp_path, poisoned, model_folder, dataset
):
    profiled = write_config(
        tmp_path / "profiled",
        model_folder,
        dataset,
        batch_size=4,
        max_steps=3,
        profiler={"enabled": True, "ranks": [1], **CYCLE},
    )
    paths = pair(tmp_path, poisoned, optimizer=FUSED, batch_size=4)
    said = train(*paths, profiled, ranks=2)
    assert_skipped(tmp_path)
    assert "loss      nan" in said and "1 updates skipped" in said
    assert_profiled(tmp_path / "profiled/profile", rank=1, steps={2, 3})


CYCLE = {"wait_steps": 0, "warmup_steps": 1, "active_steps": 2, "num_cycles": 1}


def assert_profiled(folder: Path, rank: int, steps: set[int]) -> None:
    """One rank's trace, where TensorBoard's profiler tab finds it, and its summary, of `steps`."""
    from torch_tb_profiler.consts import WORKER_PATTERN

    traces = list(folder.glob("*.json"))
    assert [WORKER_PATTERN.match(trace.name)[1] for trace in traces] == [f"rank_{rank}"]
    names = {event.get("name", "") for event in json.loads(traces[0].read_text())["traceEvents"]}
    # torch numbers the steps of one start from 0.
    assert {n for n in names if n.startswith("ProfilerStep")} == {
        f"ProfilerStep#{step - 1}" for step in steps
    }
    assert "aten::mm" in names
    summary = (folder / f"summary_rank_{rank}.txt").read_text()
    assert "aten::mm" in summary and "Self CPU %" in summary
    assert {p.name for p in folder.iterdir()} == {traces[0].name, f"summary_rank_{rank}.txt"}


def test_torchtunes_profiler_keys_record_the_first_rank_of_the_node(
    tmp_path, model_folder, dataset
):
    settings = {"_component_": "torchtune.training.setup_torch_profiler", "enabled": True}
    settings |= CYCLE | {"wait_steps": 1}
    path = write_config(tmp_path, model_folder, dataset, max_steps=5, profiler=settings)
    assert run_here(path) == 0
    assert_profiled(tmp_path / "profile", rank=0, steps={3, 4})


def test_a_rank_that_is_not_there_cannot_be_profiled(tmp_path, model_folder, dataset):
    settings = {"enabled": True, "ranks": [0, 5]}
    config = load(write_config(tmp_path, model_folder, dataset, profiler=settings))
    world = distributed.start("cpu")
    try:
        with pytest.raises(ConfigError, match=r"ranks: there is no rank 5, the run has 1"):
            profiler(config, world)
    finally:
        distributed.stop()


def test_too_many_in_a_row_end_the_run_for_good(tmp_path, model_folder, dataset, capfd):
    """A learning rate so high that nothing is finite after the second step."""
    path = write_config(
        tmp_path,
        model_folder,
        dataset,
        optimizer={"_component_": "torch.optim.SGD", "lr": 1e30},
        clip_grad_norm=None,
        log_every_n_steps=100,
        save_every_n_steps=3,
        max_steps=40,
        max_non_finite_steps=2,
    )
    assert run_here(path) == 65
    text = capfd.readouterr().err
    assert "the loss or the gradient was not finite in 2 steps in a row" in text
    assert "Traceback" not in text
    record = error_record(tmp_path)
    assert record["permanent"] is True and record["type"] == "NonFiniteLossError"
    assert not (tmp_path / "checkpoints").exists()


def test_a_run_that_never_updated_has_not_completed(tmp_path, poisoned, capfd):
    """Fewer steps than max_non_finite_steps, and none of them finite."""
    path = write_config(
        tmp_path, poisoned["model"], poisoned["with"], shuffle=False, max_steps=1, epochs=1
    )
    content = yaml.safe_load(path.read_text())
    content["dataset"]["split"] = f"train[{PER_STEP * (BAD_STEP - 1)}:{PER_STEP * BAD_STEP}]"
    path.write_text(yaml.safe_dump(content))
    assert run_here(path) == 65
    assert "step 1: the loss or the gradient was not finite in every step" in capfd.readouterr().err
    assert not (tmp_path / "export").exists() and not (tmp_path / "checkpoints").exists()


def test_a_tokenizer_of_another_model_is_refused(tmp_path, model_folder):
    other = {"vocab_size": 3, "bos_token_id": 1, "eos_token_id": [2, 9]}
    (tmp_path / "config.json").write_text(json.dumps(other))
    found = faults(hugging_face_tokenizer(str(model_folder)), tmp_path)
    wanted = ("it has 1024 tokens, the model knows 3", "its eos_id is 4, the model knows 3")
    wanted += ("its bos_id is 0, the model's 1", "it ends a text by 4, the model by 2 or 9")
    for line, text in zip(found, wanted, strict=True):
        assert text in line and "give the tokenizer that belongs to" in line


def test_an_empty_dataset_is_refused(tmp_path, model_folder):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    world = distributed.start("cpu")
    try:
        with pytest.raises(ConfigError, match="dataset: has no sample"):
            build(load(write_config(tmp_path, model_folder, empty)), world)
    finally:
        distributed.stop()


def test_a_warm_up_that_never_ends_is_noted():
    block = {"_component_": "x", "num_warmup_steps": 100}
    assert warmup_note(None, 5) is None and warmup_note(block, 101) is None
    note = str(warmup_note(block, 5))
    assert note.startswith(
        "note: lr_scheduler.num_warmup_steps: 100 steps of warm-up in a run of 5"
    )


@pytest.mark.parametrize("status", [0, 1])
def test_a_rank_ends_at_once_whatever_its_threads_do(status):
    """A thread of gloo that is alive while Python cleans up can abort a rank that has finished."""
    code = (
        "import atexit, threading, time; from trainer import start;"
        "threading.Thread(target=time.sleep, args=(600,)).start();"
        "atexit.register(print, 'at exit');"
        f"start.leave({status})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (status, "" if status else "at exit\n"), done.stderr
