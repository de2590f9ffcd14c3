"""Faults of a run whose answers are generated on nodes of their own."""

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.faults.kit import attempts, ended, processes_of
from tests.launcher.kit import Kit, checkpoints, losses, ranks_of, report, until
from trainer import demo_sums

RUN = [
    *("--recipe", "demo_grpo", "--nodes", "1", "--gpus-per-node", "1", "batch_size=32"),
    *("max_steps=120", "save_every_n_steps=10", "log_every_n_steps=1", "updates_per_rollout=1"),
    "enable_async_checkpointing=false",
]
PROGRAM = "trainer.grpo"


def rollout(run: Path) -> dict[str, Any]:
    path = run / "rollout.json"
    return json.loads(path.read_text()) if path.exists() else {"replicas": [], "deaths": []}


def replica(run: Path) -> int:
    """The process of the one replica, once it listens."""
    path = run / ".rollout/replica_0.json"
    return int(json.loads(until(lambda: path.exists() and path.read_text(), 60))["pid"])


def reaches(run: Path, step: int) -> None:
    until(lambda: max(checkpoints(run), default=0) >= step, 120, lambda: report(run))


@pytest.fixture(scope="session")
def in_turns(user: Kit, root: Path) -> Path:
    """A run that nothing happened to, with rollouts on the GPUs that train."""
    demo_sums.make(root / "models/demo-sums", steps=40)
    _, run = user.submit(*RUN)
    ended(user, run, "COMPLETED")
    return run


def assert_equal(run: Path, other: Path) -> None:
    assert losses(run) == losses(other)
    names = ("export/model.safetensors", "rollouts.jsonl")
    assert [(run / name).read_bytes() for name in names] == [
        (other / name).read_bytes() for name in names
    ]


@pytest.mark.long
def test_a_replica_and_then_a_rank_that_are_killed_change_no_loss(user: Kit, in_turns: Path):
    _, run = user.submit(*RUN, "resources.rollout=1")
    reaches(run, 10)
    os.kill(replica(run), signal.SIGKILL)
    until(lambda: rollout(run)["deaths"], 30, lambda: report(run))
    assert [each["reason"] for each in rollout(run)["deaths"]] == ["killed by SIGKILL"]
    reaches(run, 30)
    second = replica(run)
    os.kill(ranks_of(run, PROGRAM)[0], signal.SIGKILL)
    lines = ended(user, run, "COMPLETED")
    assert [line["cause"] for line in lines] == ["killed", "finished"], report(run)
    status = json.loads((run / "status.json").read_text())
    assert (len(status["nodes"]), len(status["rollout_nodes"])) == (1, 1)
    assert len(rollout(run)["deaths"]) == 1, "the replica waited for the next attempt"
    assert not Path(f"/proc/{second}").exists() and not (run / ".rollout").exists()
    assert_equal(run, in_turns)


@pytest.mark.named
def test_a_replica_that_is_stopped_is_replaced(user: Kit, in_turns: Path):
    _, run = user.submit(*RUN, "resources.rollout=1")
    reaches(run, 10)
    os.kill(replica(run), signal.SIGSTOP)
    lines = ended(user, run, "COMPLETED", timeout=240)
    assert len(lines) == 1
    assert rollout(run)["deaths"][0]["reason"] == "did not answer for 20 s"
    assert_equal(run, in_turns)


@pytest.mark.named
def test_a_job_whose_replicas_cannot_start_gives_its_nodes_back(user: Kit, in_turns: Path):
    """They are killed before they listen: three times, and the attempt fails within a minute."""
    _, run = user.submit(*RUN, "resources.rollout=1", "max_retries=0")
    until(lambda: _kill_replicas(run) and rollout(run)["deaths"], 60, lambda: report(run))
    began = time.monotonic()
    until(lambda: _kill_replicas(run) and attempts(run), 60, lambda: report(run))
    assert time.monotonic() - began < 60
    (line,) = ended(user, run, "FAILED")
    assert "ended 3 times before it was ready: killed by SIGKILL" in line["message"], report(run)


def _kill_replicas(run: Path) -> bool:
    for process in processes_of(run):
        with suppress(OSError):
            if b"trainer.replica" in Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0"):
                os.kill(process, signal.SIGKILL)
    return True


@pytest.mark.named
def test_a_cancelled_job_leaves_nothing_and_resumes(user: Kit, in_turns: Path):
    _, run = user.submit(*RUN, "resources.rollout=1")
    reaches(run, 10)
    done = user.cookbook("cancel", run.name)
    assert done.returncode == 0, done.stderr
    ended(user, run, "CANCELLED")
    assert user.cookbook("resume", run.name).returncode == 0
    user.wait(run, "COMPLETED")
    assert_equal(run, in_turns)
