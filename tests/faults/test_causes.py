"""Who or what ended an attempt, on a real Slurm: each is told apart, and has its own answer."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.faults.conftest import user_of
from tests.faults.kit import (
    SHORT,
    Undisturbed,
    attempts,
    ended,
    parent,
    rank,
    trains,
)
from tests.launcher.kit import BY_SHELL, Kit, command, processes_of, project, report, until

WAIT = "print('waiting', flush=True)\nimport time\ntime.sleep(600)\n"


def waits(user: Kit, folder: Path, script: str = WAIT, **recipe) -> tuple[str, Path]:
    """A run of a script that does nothing but wait, once it does so."""
    job, run = user.submit(
        "--recipe", str(project(folder, script, **BY_SHELL, **recipe)), "--nodes", "1"
    )
    log = run / "logs" / "0" / "rank_0.log"
    until(lambda: log.exists() and "waiting" in log.read_text(), 120, lambda: report(run))
    return job, run


def told(run: Path) -> tuple[str, str]:
    """The state and the cause that the job has written."""
    status = json.loads((run / "status.json").read_text())
    return status["state"], status.get("cause", "")


def goes_on(run: Path, timeout: float) -> None:
    """Wait until the second attempt runs."""

    def number() -> int:
        return json.loads((run / "status.json").read_text())["attempt"]

    until(lambda: number() == 1 and told(run)[0] == "RUNNING", timeout, lambda: report(run))


@pytest.fixture(scope="module")
def limited(user: Kit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose job has a minute, of which it needs all: other tests run meanwhile."""
    short = {"nodes": 1, "gpus_per_node": 1, "time": "1"}
    return waits(user, tmp_path_factory.mktemp("limited"), resources=short)[1]


def test_a_plain_scancel_is_a_cancelled_run(user: Kit, slurm, tmp_path):
    job, run = waits(user, tmp_path)
    slurm.run(["scancel", job])
    (line,) = ended(user, run, "CANCELLED", timeout=60)
    assert (line["cause"], line["message"]) == ("cancelled", "its job was cancelled")


@pytest.mark.long
def test_a_scancel_of_a_requeued_job_is_recorded(user: Kit, slurm, tmp_path):
    job, run = waits(user, tmp_path)
    slurm.run(["scontrol", "requeuehold", job])
    until(lambda: told(run)[0] == "INTERRUPTED", 60, lambda: report(run))
    slurm.run(["scancel", job])
    user.wait(run, "CANCELLED", timeout=60)
    # Slurm forgets the job later; the record stays.
    assert told(run) == ("CANCELLED", "cancelled"), report(run)
    message = json.loads((run / "status.json").read_text())["message"]
    assert message == "its job was cancelled while it was pending"


@pytest.mark.long
def test_a_killed_tee_is_named_on_its_own_node(user: Kit):
    _, run = user.submit(*SHORT)
    trains(run)
    for process in processes_of(run, "tee"):
        if command(process) == f"tee -a {run}/logs/0/rank_0.log":
            os.kill(process, signal.SIGKILL)
    first, second = ended(user, run, "COMPLETED")
    assert (first["cause"], first["node"]) == ("killed", "n1"), report(run)
    assert "tee or sed, which slurm/rank.sh starts for the rank's log" in first["message"]
    assert second["cause"] == "finished"


@pytest.mark.long
@pytest.mark.usefixtures("limited")
def test_a_requeue_by_somebody_is_told_and_the_run_goes_on(user: Kit, slurm, tmp_path):
    job, run = waits(user, tmp_path)
    slurm.run(["scontrol", "requeue", job])
    goes_on(run, 60)
    assert [line["cause"] for line in attempts(run)] == ["requeued"], report(run)
    slurm.run(["scancel", job])
    ended(user, run, "CANCELLED", timeout=60)


@pytest.mark.long
def test_a_killed_torchrun_costs_neither_the_allocation_nor_a_result(
    user: Kit, undisturbed: Undisturbed
):
    _, run = user.submit(*SHORT)
    trains(run)
    os.kill(parent(rank(run, 1)), signal.SIGKILL)
    first, second = ended(user, run, "COMPLETED")
    assert first["cause"] == "killed" and first["node"] == "n2", report(run)
    assert "starts this node's ranks (task 1) was killed" in first["message"]
    assert (second["cause"], second["restart_count"]) == ("finished", 0)
    undisturbed.is_equalled_by(run)


@pytest.mark.long
def test_a_preemption_is_told(new_cluster, root, tmp_path):
    preempts = ["PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE"]
    options = [word for setting in preempts for word in ("--set", setting)]
    with new_cluster("preempt", "--requeue-delay", "5", *options) as cluster:
        user = user_of(cluster, root)
        cluster.run(["scontrol", "update", "PartitionName=debug", "PriorityTier=10"])
        job, run = waits(user, tmp_path)
        urgent = ["srun", "--partition=debug", "--nodes=2", "--exclusive", "sleep", "10"]
        assert cluster.run(urgent).returncode == 0
        goes_on(run, 90)
        assert [line["cause"] for line in attempts(run)] == ["preempted"], report(run)
        cluster.run(["scancel", job])
        ended(user, run, "CANCELLED", timeout=60)


@pytest.mark.long
def test_a_memory_limit_of_slurm_is_told(new_cluster, root, tmp_path):
    settings = [
        "JobAcctGatherType=jobacct_gather/linux",
        "JobAcctGatherParams=OverMemoryKill",
        "JobAcctGatherFrequency=2",
    ]
    options = [word for setting in settings for word in ("--set", setting)]
    grows = "print('waiting', flush=True)\nx = b'x' * (3 << 29)\nimport time\ntime.sleep(60)\n"
    with new_cluster("memory", "--requeue-delay", "5", *options) as cluster:
        user = user_of(cluster, root)
        resources = {"nodes": 1, "gpus_per_node": 1, "mem": "900M", "time": "10"}
        _, run = waits(user, tmp_path, grows, resources=resources, max_retries=5)
        first, second = ended(user, run, "FAILED", timeout=240)
        assert first["cause"] == second["cause"] == "out_of_memory", report(run)
        assert "memory limit" in second["message"] and "twice in a row" in second["message"]


@pytest.mark.long
def test_slurms_own_time_limit_is_told(limited: Path):
    until(lambda: told(limited)[0] != "RUNNING", 180, lambda: report(limited))
    assert told(limited) == ("INTERRUPTED", "time_limit")
