"""Checkpoints by themselves, in a world of one: copies, retention, fences, and who waits."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.failing_storage import FailingStorage
from trainer.checkpoint import staging
from trainer.checkpoint.checkpoint import Checkpoints
from trainer.checkpoint.committed import TrainerState
from trainer.errors import StorageError, SupersededError, TrainerError
from trainer.parallel import world as distributed

LARGE = 3500  # weights and Adam's two moments of LARGE x LARGE in fp32 are 147 MB


class Model:
    """One layer that has taken a step, so that the optimizer has a state."""

    def __init__(self, size: int = 8, device: str = "cpu") -> None:
        self.module = nn.Linear(size, size, device=device)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1)
        self.step()

    def step(self) -> None:
        self.module(torch.ones_like(self.module.weight[:2])).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, checkpoints: Checkpoints, step: int, wait: bool = True, **state) -> None:
        checkpoints.save(self.module, self.optimizer, TrainerState(step=step, **state), wait)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def wait_for_shard(folder: Path, step: int) -> None:
    """Return as soon as the writer has begun with its file."""
    deadline = time.monotonic() + 60
    while not list((folder / "checkpoints").glob(f".tmp_step_{step}.*/__0_*")):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def save_twice_and_train_on(folder: Path) -> None:
    """What the killed process runs: the second save is on its way when training goes on."""
    checkpoints = Checkpoints(folder, distributed.start("cpu"), 0, keep=2, asynchronous=True)
    model = Model(LARGE)
    model.save(checkpoints, 1)
    model.save(checkpoints, 2, wait=False)
    time.sleep(60)


def test_a_copy_holds_what_was_there_and_is_used_again(world):
    from torchao.optim import AdamW8bit

    model = nn.Linear(256, 64)
    optimizer = AdamW8bit(model.parameters())
    model(torch.ones(1, 256)).sum().backward()
    # torchao compiles the update, which takes 10 s and is not what is tested.
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    mesh = init_device_mesh("cpu", (1,))
    state = {
        "sharded": distribute_tensor(torch.arange(12.0).view(3, 4), mesh, [Shard(0)]),
        "eight_bit": optimizer.state[model.weight],
        "groups": [{"lr": 0.5, "betas": (0.9, 0.99)}, torch.ones(3, dtype=torch.bfloat16)[::2]],
    }
    codes = state["eight_bit"]["exp_avg"].codes
    expected = codes.clone()
    staged, _ = staging.stage(state)
    assert staged["sharded"].placements == (Shard(0),) and staged["groups"][0] == {
        "lr": 0.5,
        "betas": (0.9, 0.99),
    }
    assert type(staged["eight_bit"]["exp_avg"]) is type(state["eight_bit"]["exp_avg"])
    codes.add_(1)
    state["sharded"].to_local().zero_()
    assert torch.equal(staged["eight_bit"]["exp_avg"].codes, expected)
    assert torch.equal(staged["sharded"].to_local(), torch.arange(12.0).view(3, 4))

    again, _ = staging.stage(state, staged)
    assert torch.equal(again["eight_bit"]["exp_avg"].codes, codes)
    assert again["sharded"].to_local().data_ptr() == staged["sharded"].to_local().data_ptr()
    held = {t.data_ptr(): t.numel() * t.element_size() for t in staging._tensors(again)}
    assert staging.staged_bytes(state) == sum(held.values())


@pytest.mark.alone
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, world):
    model = Model(LARGE)
    checkpoints = Checkpoints(tmp_path, world, attempt=0, keep=2, asynchronous=True)
    blocked = []
    for step, wait in ((1, True), (2, False), (3, False), (4, False)):
        before = checkpoints.blocked_s
        model.save(checkpoints, step, wait)
        blocked.append(checkpoints.blocked_s - before)
        if step != 3:  # the fourth save finds the third still being written
            checkpoints.wait()
    saved = model.module.weight.detach().clone()
    model.save(checkpoints, 5, wait=False)
    model.step()
    checkpoints.wait()
    assert checkpoints.newly_committed() == [1, 2, 3, 4, 5]
    assert names(tmp_path) == ["step_4", "step_5"]
    print(f"training waited {[round(seconds, 3) for seconds in blocked]} s")
    # The first copy makes its memory, later ones use it again.
    synchronous, _, copied, queued = blocked
    assert copied < synchronous / 3, "training must wait for the copy only"
    assert queued > synchronous / 3, "a save must wait for the one before it"

    # What was written is what was there when the save began.
    other = Model(LARGE)
    state = checkpoints.load(other.module, other.optimizer, {})
    assert state is not None and state.step == 5
    assert torch.equal(other.module.weight, saved) and not torch.equal(model.module.weight, saved)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_update_right_after_a_save_waits_for_the_copy(tmp_path, world):
    model = Model(LARGE, device="cuda")
    checkpoints = Checkpoints(tmp_path, world, attempt=0, keep=1, asynchronous=True)
    # The first copy makes its memory, which the device waits for.
    model.save(checkpoints, 1, wait=False)
    checkpoints.wait()
    saved = model.module.weight.detach().clone()
    gradient = torch.ones_like(model.module.weight)
    model.save(checkpoints, 2, wait=False)
    for _ in range(3):
        model.module.weight.grad = gradient
        model.optimizer.step()
    checkpoints.wait()
    other = Model(LARGE, device="cuda")
    checkpoints.load(other.module, other.optimizer, {})
    assert torch.equal(other.module.weight, saved) and not torch.equal(model.module.weight, saved)


def test_without_memory_for_a_copy_training_waits(tmp_path, world, monkeypatch, capsys):
    group = tmp_path / "job"
    group.mkdir()
    for name, text in (("max", "9000"), ("current", "8500"), ("stat", "inactive_file 100\n")):
        (group / f"memory.{name}").write_text(text)
    (tmp_path / "memory.max").write_text("max")
    monkeypatch.setattr(staging, "_cgroups", lambda: [(group, staging.CGROUP_2)])
    assert staging.available_bytes() == 600
    checkpoints = Checkpoints(tmp_path, world, attempt=0, keep=2, asynchronous=True)
    Model().save(checkpoints, 1, wait=False)
    assert names(tmp_path) == ["step_1"]
    assert "training waits while checkpoints are written" in capsys.readouterr().out


def test_the_best_checkpoint_is_kept_and_found_by_a_later_start(tmp_path, world):
    model = Model()
    first = Checkpoints(tmp_path, world, attempt=0, keep=2)
    weights = {}
    for step, loss in ((1, None), (2, 0.5), (3, 0.4), (4, 0.6), (5, None)):
        model.step()
        weights[step] = model.module.weight.detach().clone()
        model.save(first, step, val_loss=loss)
    assert first.committed.best() == (3, 0.4)
    assert names(tmp_path) == ["step_3", "step_4", "step_5"]

    later = Checkpoints(tmp_path, world, attempt=1, keep=1)
    model.save(later, 6, val_loss=float("nan"))
    assert names(tmp_path) == ["step_3", "step_6"]
    assert later.load_weights(3, model.module) is None
    assert torch.equal(model.module.weight, weights[3])
    (tmp_path / "checkpoints/step_3/manifest.json").write_text("{}")
    with torch.no_grad():
        model.module.weight.zero_()
    assert later.load_weights(3, model.module) == "the manifest is missing or changed"
    assert not model.module.weight.any(), "nothing of a damaged checkpoint may be loaded"
    model.save(later, 7, val_loss=0.2)
    assert later.committed.best() == (7, 0.2) and names(tmp_path) == ["step_7"]


@pytest.mark.parametrize(
    ("pattern", "change", "told"),
    [
        ("__0_0.distcp", lambda content: content[:-100], "missing or cut short"),
        ("__0_0.distcp", lambda content: content[:-1] + b"?", "has changed on the disk"),
        ("__0_0.distcp", None, "missing or cut short"),
        (".metadata", lambda content: b"?" + content[1:], "has changed on the disk"),
        ("trainer_state.json", lambda content: content[:-1] + b" ", "has changed on the disk"),
        ("manifest.json", None, "manifest is missing"),
        ("manifest.json", lambda content: content + b" ", "manifest is missing or changed"),
        ("COMPLETE", None, "COMPLETE is missing"),
    ],
)
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(
    pattern, change, told, tmp_path, world, capsys
):
    model = Model()
    checkpoints = Checkpoints(tmp_path, world, attempt=0, keep=2)
    model.save(checkpoints, 1)
    expected = model.module.weight.detach().clone()
    model.step()
    model.save(checkpoints, 2)
    path = tmp_path / "checkpoints/step_2" / pattern
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    state = checkpoints.load(model.module, model.optimizer, {})
    assert state is not None and state.step == 1
    assert torch.equal(model.module.weight, expected)
    assert names(tmp_path) == ["damaged_step_2", "step_1"] and told in capsys.readouterr().out


def test_a_fault_beside_the_training_is_told_and_leaves_the_older_checkpoint(tmp_path, world):
    model = Model(512)
    checkpoints = Checkpoints(tmp_path, world, attempt=0, keep=2, asynchronous=True)
    model.save(checkpoints, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A limit on the size of a file stops the writer in the middle of it, as a full disk does.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        model.save(checkpoints, 2, wait=False)
        checkpoints.settle()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert checkpoints.failed_here()
    with pytest.raises((OSError, StorageError), match="checkpoint on rank 0"):
        model.save(checkpoints, 3, wait=False)
    assert names(tmp_path) == ["step_1"]
    assert not checkpoints.failed_here(), "a fault is told once"
    model.save(checkpoints, 4, wait=False)
    checkpoints.wait()
    assert names(tmp_path) == ["step_1", "step_4"]


def test_a_save_is_not_committed_once_a_newer_start_has_taken_over(tmp_path, world):
    model = Model(LARGE)
    checkpoints = Checkpoints(tmp_path, world, attempt=0, keep=2, asynchronous=True)
    model.save(checkpoints, 1, wait=False)
    wait_for_shard(tmp_path, step=1)
    (tmp_path / "progress.json").write_text(json.dumps({"attempt": 1}))
    with pytest.raises(TrainerError, match="start 1 has taken over"):
        checkpoints.wait()
    assert names(tmp_path) == []


def test_a_kill_during_a_save_leaves_the_checkpoint_before(tmp_path, world):
    code = "from tests.trainer.checkpoint.test_checkpoint import *; "
    code += "save_twice_and_train_on(Path(sys.argv[1]))"
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys; {code}", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    wait_for_shard(tmp_path, step=2)
    process.kill()
    process.wait()
    assert names(tmp_path) == [".tmp_step_2.0", "step_1"]
    checkpoints = Checkpoints(tmp_path, world, attempt=1, keep=2, asynchronous=True)
    model = Model(LARGE)
    state = checkpoints.load(model.module, model.optimizer, {})
    assert state is not None and state.step == 1
    model.save(checkpoints, 2, wait=False)
    checkpoints.wait()
    assert names(tmp_path) == ["step_1", "step_2"]


READ_BADLY = """
import errno, os, sys, threading
from tests.trainer.checkpoint.test_checkpoint import *
from trainer.errors import kind

folder, control = Path(sys.argv[1]), Path(os.environ["FAILING_STORAGE"])
model, checkpoints = Model(), Checkpoints(folder, distributed.start("cpu"), 0, keep=2)
for step in (1, 2):
    model.save(checkpoints, step)
for number, part in FAULTS:
    for lasts_s in (0.6, 30):
        os.environ["STORAGE_WAIT_S"] = "60" if lasts_s < 30 else "0.3"
        control.write_text(f"{number} checkpoints{part}")
        timer = threading.Timer(lasts_s, control.unlink)
        timer.start()
        try:
            state = checkpoints.load(model.module, model.optimizer, {})
            print(part, state.step if state else state, names(folder))
        except Exception as error:
            timer.cancel()
            control.unlink()
            print(part, kind(error), error.permanent, names(folder), str(error))
"""
UNREADABLE = [
    (errno.ESTALE, "/step_2/__0_0.distcp"),
    (errno.EIO, "/step_2/COMPLETE"),
    (errno.ESTALE, "/step_2/manifest.json"),
    (errno.ESTALE, ""),
]


@pytest.mark.long
def test_storage_that_cannot_be_read_is_no_damage(tmp_path):
    storage = FailingStorage(tmp_path)
    code = READ_BADLY.replace("FAULTS", repr(UNREADABLE))
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])} | storage.env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    whole = ["step_1", "step_2"]
    found = [line for line in done.stdout.splitlines() if "step_1" in line]
    for (_, part), moment, lasting in zip(UNREADABLE, found[::2], found[1::2], strict=True):
        assert moment == f"{part} 2 {whole}"
        assert lasting.startswith(f"{part} StorageError False {whole} {tmp_path}/checkpoints{part}")
        assert "move" not in lasting


def test_an_older_start_commits_nothing_beside_a_newer_one(tmp_path, world):
    """The ranks of a node that Slurm has given up go on, and write progress.json meanwhile."""
    model = Model()
    old, new = (Checkpoints(tmp_path, world, attempt, keep=5) for attempt in (0, 1))
    for step in (1, 2):
        model.save(old, step)
    (tmp_path / "status.json").write_text(json.dumps({"attempt": 1}))
    (tmp_path / "progress.json").write_text(json.dumps({"attempt": 0}))
    begun = new.committed.temporary(2)
    begun.mkdir()
    with pytest.raises(SupersededError, match="start 0 of the run and start 1 has taken over"):
        model.save(old, 3)
    assert begun.exists(), "an older start must not remove what a newer one writes"
    # The newer start resumes from step 1, and comes to a step that the older one has saved.
    model.step()
    model.save(new, 2)
    assert names(tmp_path) == ["step_1", "step_2"]
    other = Model()
    assert new.load(other.module, other.optimizer, {}).step == 2
    assert torch.equal(other.module.weight, model.module.weight)


def test_a_copied_checkpoint_is_passed_over(tmp_path, world, capsys):
    model, checkpoints = Model(), Checkpoints(tmp_path, world, attempt=0, keep=2)
    for step in (1, 2):
        model.save(checkpoints, step)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "step_2", folder / "step_5")
    state = checkpoints.load(model.module, model.optimizer, {})
    assert state is not None and state.step == 2
    said = "step_5 is damaged and renamed: it is a copy of the checkpoint of step 2"
    assert said in capsys.readouterr().out
    assert names(tmp_path) == ["damaged_step_5", "step_1", "step_2"]
