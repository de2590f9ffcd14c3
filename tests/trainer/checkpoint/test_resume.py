"""A run that was killed, stopped or damaged goes on as if nothing had happened, or refuses."""

import json
import math
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from slurm import faults
from tests.trainer.runs import (
    ROOT,
    curve,
    error_record,
    finish,
    kill_rank,
    lora_model,
    metrics,
    progress,
    rank_processes,
    reopen,
    start,
    train,
    wait_for_step,
    write_config,
)
from trainer.config import load
from trainer.loop import Trainer
from trainer.methods.sft import SupervisedFineTuning

STEPS = 30


# Apart from the tests' own dataset.
VALIDATION = {
    "data_files": str(ROOT / "configs/datasets/slurm_qa.jsonl"),
    "split": "train[:10]",
}


def config(
    folder: Path,
    model_folder: Path,
    dataset: Path,
    ranks: int,
    lora: bool = False,
    **changes: Any,
) -> Path:
    """30 steps over several epochs; LoRA's dropout makes the ranks' random state matter."""
    dropout = {"model": lora_model(lora_dropout=0.1)} if lora else {}
    scheduler = {
        "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
        "num_warmup_steps": 5,
    }
    standard = {
        "batch_size": 8 // ranks,
        "max_steps": STEPS,
        "save_every_n_steps": 4,
        "lr_scheduler": scheduler,
    }
    return write_config(folder, model_folder, dataset, **standard | dropout | changes)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, model_folder, dataset):
    """The folder of an uninterrupted full run on 2 ranks."""
    folder = tmp_path_factory.mktemp("whole") / "two"
    train(config(folder, model_folder, dataset, ranks=2), ranks=2)
    return folder


@pytest.mark.long
def test_kill_then_stop_file_then_sigterm(two_ranks, tmp_path, model_folder, dataset):
    """One run, interrupted three times in three ways on 2 ranks, ends like the whole one.

    It saves beside its training, the whole one does not. Its first start is torchrun's, as a job's.
    """
    folder = tmp_path / "run"
    path = config(folder, model_folder, dataset, ranks=2, enable_async_checkpointing=True)

    first = start(path, ranks=2, attempt=0, fresh=True)
    wait_for_step(path, 6, first)
    kill_rank(first, 1)
    assert finish(first, status=None) and first.returncode != 0
    assert progress(folder)["state"] == "running"

    second = start(path, ranks=2, attempt=1)
    wait_for_step(path, 14, second)
    (folder / ".stop").touch()
    assert "resuming from checkpoints/step_" in finish(second)
    stopped = progress(folder)
    assert stopped["state"] == "stopped" and stopped["attempt"] == 1
    assert stopped["checkpoint_step"] == stopped["step"] == metrics(folder)[-1]["step"] < STEPS
    assert not (folder / ".stop").exists()

    third = start(path, ranks=2, attempt=2)
    wait_for_step(path, stopped["step"] + 3, third)
    rank_processes(third)[1].send_signal(signal.SIGTERM)
    finish(third)
    assert progress(folder)["state"] == "stopped"

    train(path, ranks=2, attempt=3)
    final = progress(folder)
    assert final["state"] == "finished" and final["step"] == final["total_steps"] == STEPS
    assert curve(folder) == curve(two_ranks)
    assert (folder / "export/model.safetensors").read_bytes() == (
        two_ranks / "export/model.safetensors"
    ).read_bytes()
    kept = sorted(p.name for p in (folder / "checkpoints").iterdir())
    assert kept == ["step_28", "step_30"]
    assert "already finished" in train(path, ranks=1, attempt=4)


@pytest.mark.long
def test_packed_lora_with_dropout_and_validation_killed_on_one_rank(
    tmp_path, model_folder, dataset
):
    """Neither a validation pass, workers nor torch's deterministic mode change what a run does."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(config(whole, model_folder, dataset, ranks=1, lora=True, row_length=96))
    path = config(
        killed,
        model_folder,
        dataset,
        ranks=1,
        lora=True,
        row_length=96,
        dataset_val=VALIDATION,
        run_val_every_n_steps=7,
        num_workers=2,
        enable_async_checkpointing=True,
        cudnn_deterministic_mode=2,
    )
    first = start(path)
    wait_for_step(path, 10, first)
    rank_processes(first)[0].send_signal(signal.SIGSEGV)
    # A crash of a library in C says where in Python it was.
    said = finish(first, status=-signal.SIGSEGV)
    assert "Fatal Python error: Segmentation fault" in said and "trainer/loop.py" in said
    # A killed writer may leave half a line and half a checkpoint.
    with open(killed / "metrics.jsonl", "a") as file:
        file.write('{"step": 11, "lo')
    (killed / "checkpoints/.tmp_step_12.0").mkdir()
    said = train(path, attempt=1)
    assert curve(killed) == curve(whole)
    losses = {line["step"]: line["val_loss"] for line in metrics(killed) if "val_loss" in line}
    assert list(losses) == [7, 14, 21, 28, 30]
    names = {p.name for p in (killed / "checkpoints").iterdir()}
    # The best by validation is kept beside the last two, and exported.
    best = min(losses, key=losses.__getitem__)
    assert names == {f"step_{best}", "step_28", "step_30"}
    assert f"exporting step {best}: its val_loss {losses[best]:.4f} is the lowest of all" in said
    assert progress(killed)["best_step"] == best
    shard = next((killed / "checkpoints/step_30").glob("__0_*"))
    assert shard.stat().st_size < 1_000_000, "LoRA's checkpoints must not hold the base model"

    state = json.loads((killed / "checkpoints/step_30/trainer_state.json").read_text())
    assert state["val_loss"] == losses[30]
    assert losses[best] == pytest.approx(mean_answer_loss(killed / "export"), abs=1e-5)
    path.write_text(path.read_text() + "export_checkpoint: last\n")
    shutil.rmtree(killed / "export")
    reopen(killed)
    train(path, attempt=2)
    assert losses[30] == pytest.approx(mean_answer_loss(killed / "export"), abs=1e-5)


def mean_answer_loss(export: Path) -> float:
    """What transformers makes of the validation pairs, one by one: the mean over their answers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(export).eval()
    tokenizer = AutoTokenizer.from_pretrained(export)
    total, count = 0.0, 0
    for line in Path(VALIDATION["data_files"]).read_text().splitlines()[:10]:
        pair = json.loads(line)
        turns = [
            {"role": "user", "content": pair["question"]},
            {"role": "assistant", "content": pair["answer"]},
        ]
        asked = tokenizer.apply_chat_template(
            turns[:1], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        tokens = tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"][:96]
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0, len(asked) - 1 : -1]
        answer = torch.tensor(tokens[len(asked) :])
        total += F.cross_entropy(logits, answer, reduction="sum").item()
        count += len(answer)
    return total / count


def test_damaged_checkpoint_falls_back_and_all_damaged_refuses(two_ranks, model_folder):
    before = curve(two_ranks)
    newest = two_ranks / "checkpoints/step_30"
    shard = next(newest.glob("__1_*"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    reopen(two_ranks)
    output = train(two_ranks / "train.yaml", ranks=2, attempt=1)
    assert "checkpoints/step_30 is damaged and renamed" in output
    assert "resuming from checkpoints/step_28" in output
    assert curve(two_ranks) == before
    assert (two_ranks / "checkpoints/damaged_step_30").is_dir()

    (two_ranks / "checkpoints/step_30/COMPLETE").unlink()
    (two_ranks / "checkpoints/step_28/manifest.json").write_text("{}")
    reopen(two_ranks)
    output = train(two_ranks / "train.yaml", ranks=2, attempt=2, status=1)
    assert "every checkpoint of this run is damaged" in output
    assert error_record(two_ranks, rank=1, attempt=2)["permanent"] is True
    assert curve(two_ranks) == before, "a refused start must leave the metrics alone"


def test_a_key_that_the_optimizers_state_lacks_is_named(tmp_path, model_folder, dataset):
    adam = {"_component_": "torch.optim.AdamW", "lr": 3e-3}
    path = write_config(tmp_path, model_folder, dataset, max_steps=1, optimizer=adam)
    train(path)
    reopen(tmp_path)
    changed = adam | {"amsgrad": True, "weight_decay": 0.5}
    write_config(tmp_path, model_folder, dataset, max_steps=2, optimizer=changed)
    output = train(path, attempt=1, status=1)
    assert "optimizer.amsgrad may not change at resume: checkpoints/step_1 was made with" in output
    assert "weight_decay" not in output and "Traceback" not in output
    assert error_record(tmp_path, attempt=1)["type"] == "ConfigError"


def test_another_config_does_not_resume(tmp_path, model_folder, dataset):
    other_base = tmp_path / "other_base"
    shutil.copytree(model_folder, other_base)
    weights = load_file(other_base / "model.safetensors")
    save_file(
        {key: tensor * 1.001 for key, tensor in weights.items()},
        other_base / "model.safetensors",
        metadata={"format": "pt"},
    )
    path = write_config(
        tmp_path, model_folder, dataset, max_steps=2, save_every_n_steps=1, model=lora_model()
    )
    train(path)
    reopen(tmp_path)
    write_config(
        tmp_path,
        other_base,
        dataset,
        max_steps=4,
        seed=4,
        batch_size=4,
        model=lora_model(lora_rank=8),
        optimizer={"_component_": "torch.optim.SGD", "lr": 0.1},
    )
    output = train(path, attempt=1, status=1)
    for name, values in {
        "seed": "3, the config gives 4",
        "samples_per_step": "8, the config gives 4 (batch_size x",
        "model.lora_rank": "4, the config gives 8",
        "optimizer._component_": "'torch.optim.AdamW', the config gives 'torch.optim.SGD'",
    }.items():
        assert f"{name} may not change at resume: checkpoints/step_" in output
        assert f"was made with {values}" in output
    assert "contains other weights than the adapter's base" in output
    assert "Traceback" not in output


def test_a_checkpoint_is_saved_when_its_minutes_have_passed(
    tmp_path, model_folder, dataset, world, monkeypatch
):
    """On a clock by which each step takes 25 s: saved in the step that begins after a minute."""
    path = write_config(
        tmp_path,
        model_folder,
        dataset,
        max_steps=9,
        save_every_n_steps=None,
        save_every_minutes=1,
        keep_last_n_checkpoints=9,
    )
    trainer = Trainer(load(path), world, 0, SupervisedFineTuning)
    clock = SimpleNamespace(monotonic=lambda: 25.0 * trainer.state.step)
    monkeypatch.setattr("trainer.loop.time", clock)
    trainer.saved_at = clock.monotonic()
    assert trainer.train()
    assert sorted(trainer.checkpoints.committed.steps()) == [4, 8, 9]


COSINE = {
    "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
    "num_warmup_steps": 2,
}


def test_what_may_change_at_resume_changes_and_is_told(
    tmp_path, model_folder, dataset, world, capsys
):
    """The schedule goes on as if it had been the new one from the start; each case 2 steps more."""
    adam = {"_component_": "torch.optim.AdamW", "lr": 3e-3}
    lower = adam | {"lr": 1e-3, "weight_decay": 0.5, "betas": [0.8, 0.9]}
    first = {"max_steps": 4, "optimizer": adam, "save_every_n_steps": 4, "lr_scheduler": COSINE}
    cases: dict[str, dict[str, Any]] = {
        "lower": {"max_steps": 6, "optimizer": lower},
        "longer": {"max_steps": 40, "log_every_n_steps": 1, "save_every_n_steps": 5},
        "constant": {"max_steps": 6, "lr_scheduler": None},
        "unchanged": {},
    }
    whole = write_config(tmp_path / "whole", model_folder, dataset, **first)
    train(whole)
    for name, changes in cases.items():
        folder = tmp_path / name
        shutil.copytree(tmp_path / "whole", folder)
        shutil.rmtree(folder / "export")
        reopen(folder)
        path = write_config(folder, model_folder, dataset, **first | changes)
        config = load(path)
        trainer = Trainer(config, world, 1, SupervisedFineTuning)
        group = trainer.optimizer.param_groups[0]
        steps = trainer.batches.total_steps
        wanted = config.optimizer["lr"]
        if config.lr_scheduler is not None:
            wanted *= 0.5 * (1 + math.cos(math.pi * (4 - 2) / (steps - 2)))
        assert group["lr"] == pytest.approx(wanted)
        for key in ("weight_decay", "betas"):
            default = trainer.optimizer.defaults[key]
            assert list(np.ravel(group[key])) == list(np.ravel(default))
        moments = trainer.optimizer.state[trainer.model.trainable[0]]
        assert int(moments["step"]) == 4 and moments["exp_avg"].any()
        told = [x for x in capsys.readouterr().out.splitlines() if x.startswith("note: ")]
        assert bool(told) == (name != "unchanged"), told
        if name == "lower":
            said = "\n".join(told)
            assert "note: optimizer.weight_decay changes from None to 0.5, from step 5" in said
            assert "note: the learning rate of step 5 changes from 0 to 0.0005" in told[-1]


def test_a_run_that_has_done_more_steps_than_it_is_given_is_refused(
    tmp_path, model_folder, dataset
):
    path = write_config(tmp_path, model_folder, dataset, max_steps=3)
    train(path)
    reopen(tmp_path)
    path = write_config(tmp_path, model_folder, dataset, max_steps=2)
    output = train(path, attempt=1, status=1)
    assert "give 2 steps, and checkpoints/step_3 has done more; set max_steps=3" in output


def test_a_full_disk_on_one_rank_stops_all_and_keeps_what_is_there(tmp_path, model_folder, dataset):
    """The save that fails is beside the training: all ranks stop at one step soon after it."""
    path = write_config(
        tmp_path,
        model_folder,
        dataset,
        batch_size=4,
        max_steps=5000,
        epochs=2000,
        save_every_n_steps=10,
        enable_async_checkpointing=True,
    )
    process = start(path, ranks=2)
    wait_for_step(path, 21, process)
    # A limit on the size of a file stops the writer in the middle of a shard, as a full disk does.
    rank_processes(process)[1].rlimit(psutil.RLIMIT_FSIZE, (3_000_000, 3_000_000))
    output = finish(process, status=1)
    assert re.search(r"\[rank 0\] error: another rank failed: rank 1: .*checkpoint on", output), (
        output
    )
    assert re.search(r"\[rank 1\] error: .*checkpoint on rank 1", output), output
    # Rank 1 is to blame, also where its disk took no record of it.
    logs = tmp_path / "logs" / "0"
    for _ in range(2):
        first = faults.first_error(faults.on_nodes(faults.read_errors(logs), ["n1", "n2"], 1))
        assert faults.describe(first).startswith("rank 1 on n2: StorageError: ")
        (logs / "error_rank_1.json").unlink(missing_ok=True)
    kept = sorted(int(p.name.removeprefix("step_")) for p in (tmp_path / "checkpoints").iterdir())
    assert len(kept) == 2 and progress(tmp_path)["checkpoint_step"] == kept[1] == kept[0] + 10
    assert metrics(tmp_path)[-1]["step"] <= kept[1] + 20, "the run must stop at the next save"


def test_an_older_start_stops_by_itself(tmp_path, model_folder, dataset):
    """Once the job script has recorded a newer attempt, which it does before its ranks run."""
    steps = {"max_steps": 3000, "epochs": 3000, "save_every_n_steps": 3000}
    path = write_config(tmp_path, model_folder, dataset, **steps)
    old = start(path, ranks=2)
    wait_for_step(path, 2, old)
    (tmp_path / "status.json").write_text(json.dumps({"state": "RUNNING", "attempt": 1}))
    output = finish(old, status=1, limit_s=100)
    assert output.count("this is start 0 of the run and a newer one has taken over") == 2
    assert error_record(tmp_path, 1)["type"] == "SupersededError"
    assert not list((tmp_path / "checkpoints").glob("*"))
