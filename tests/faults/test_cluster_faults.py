"""Faults of the cluster: the controller is away, a node is bad."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from runspec import files
from slurm import allocation
from tests.failing_storage import FailingStorage
from tests.faults.conftest import user_of
from tests.faults.kit import (
    SHORT,
    Undisturbed,
    attempts,
    ended,
    rank,
    trains,
)
from tests.launcher.kit import checkpoints, ranks_of, report, until

# Longer than Slurm's own time-out of a message.
AWAY_S = 12


def waits(run: Path, words: str) -> bool:
    """Whether a run waits for the controller: its status says so."""
    if os.environ.get("COOKBOOK_TEST_SLURM") == "26.05":
        # There srun itself waits when all ranks have ended, and says nothing.
        return not ranks_of(run)
    return words in (run / "status.json").read_text()


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(signal.SIGKILL, id="killed", marks=pytest.mark.long),
        pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.named),
    ],
)
def test_a_controller_that_is_away_while_a_rank_dies_costs_no_run(
    new_cluster, root, undisturbed: Undisturbed, how
):
    shape = ["--requeue-delay", "5"]
    with new_cluster("away", *shape) as cluster:
        user = user_of(cluster, root)
        _, run = user.submit(*SHORT)
        trains(run)
        controller = cluster.controller
        os.kill(controller, how)
        try:
            os.kill(rank(run, 1), signal.SIGKILL)
            until(lambda: waits(run, "waiting for Slurm's controller"), 90, lambda: report(run))
            time.sleep(AWAY_S)
        finally:
            if how == signal.SIGSTOP:
                os.kill(controller, signal.SIGCONT)
            else:
                cluster.start_dead_daemons()
        lines = ended(user, run, "COMPLETED", timeout=300)
        causes = [line["cause"] for line in lines if line["cause"] != "controller"]
        assert causes == ["killed", "finished"], report(run)
        assert lines[-1]["restart_count"] == 0, "the allocation was given away"
        undisturbed.is_equalled_by(run)


@pytest.mark.long
def test_a_requeue_waits_for_the_controller(new_cluster, root, undisturbed: Undisturbed):
    shape = ["--requeue-delay", "5"]
    with new_cluster("late", *shape) as cluster:
        user = user_of(cluster, root)
        job, run = user.submit(*SHORT)
        trains(run)
        controller = cluster.controller
        held = rank(run, 0)
        # The ranks do not stop, and take their file away, before the controller is gone.
        os.kill(held, signal.SIGSTOP)
        cluster.run(["scancel", "--batch", "--signal=USR1", job])
        # A controller answers before it has passed the signal on.
        until(lambda: (run / files.STOP).exists(), 60, lambda: report(run))
        os.kill(controller, signal.SIGKILL)
        os.kill(held, signal.SIGCONT)
        try:
            until(lambda: waits(run, "waiting to go back into"), 120, lambda: report(run))
        finally:
            cluster.start_dead_daemons()
        first, second = ended(user, run, "COMPLETED", timeout=300)
        assert (first["cause"], second["restart_count"]) == ("time_limit", 1), report(run)
        undisturbed.is_equalled_by(run)


@contextlib.contextmanager
def deadly(node: str, run: Path) -> Iterator[None]:
    """Every rank on a node dies as soon as it has started."""
    stopped = threading.Event()

    def kill() -> None:
        while not stopped.wait(0.5):
            for pid in ranks_of(run).values():
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(pid)
                    if process.environ().get("SLURMD_NODENAME") == node:
                        process.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


@pytest.mark.long
def test_a_bad_node_is_left_out(new_cluster, root, undisturbed: Undisturbed):
    with new_cluster("bad", "--nodes", "3", "--requeue-delay", "5") as cluster:
        user = user_of(cluster, root)
        job, run = user.submit(*SHORT)
        with deadly("n2", run):
            lines = ended(user, run, "COMPLETED", timeout=400)
        assert [line["node"] for line in lines] == ["n2", "n2", None], report(run)
        assert [line["cause"] for line in lines] == ["killed", "killed", "finished"]
        assert lines[-1]["nodes"] == ["n1", "n3"]
        assert lines[-1]["restart_count"] == 1
        assert {line["job_id"] for line in lines} == {job}
        undisturbed.is_equalled_by(run)


@pytest.mark.long
def test_storage_that_cannot_be_read_costs_no_checkpoint(user, undisturbed, tmp_path):
    storage = FailingStorage(tmp_path)
    env = {**storage.env, "STORAGE_WAIT_S": "1"}
    _, run = user.submit(*SHORT, *(f"+env.{key}={value}" for key, value in env.items()))
    trains(run)
    storage.fail(f"{run.name}/checkpoints/step_")
    os.kill(rank(run, 1), signal.SIGKILL)
    until(lambda: "storage" in {line["cause"] for line in attempts(run)}, 120, lambda: report(run))
    storage.recover()
    lines = ended(user, run, "COMPLETED")
    causes = [line["cause"] for line in lines]
    assert set(causes[1:-1]) == {"storage"} and causes[-1] == "finished", report(run)
    assert "could not be read for 1 s (Stale file handle)" in lines[1]["message"]
    assert not list((run / "checkpoints").glob("damaged_*"))
    undisturbed.is_equalled_by(run)


def alive(run: Path, attempt: int) -> list[int]:
    """The ranks of one attempt of a run."""
    wanted = {"RUN_DIR": str(run), "COOKBOOK_ATTEMPT": str(attempt)}.items()
    return [
        process.pid
        for process in psutil.process_iter(["environ", "name"])
        if (process.info["environ"] or {}).items() >= wanted
        and process.info["name"].startswith("rank ")
    ]


@pytest.mark.named
def test_ranks_that_slurm_has_given_up_stop_themselves(new_cluster, root, undisturbed: Undisturbed):
    """The daemons of both nodes die, and what they started goes on beside the next attempt."""
    shape = ("--nodes", "4", "--requeue-delay", "5", "--set", "SlurmdTimeout=6")
    with new_cluster("split", *shape) as cluster:
        user = user_of(cluster, root)
        # Long enough to train until Slurm has noticed.
        _, run = user.submit(*SHORT, "max_steps=2000", "epochs=1000")
        trains(run)
        for node in ("n1", "n2"):
            (pid,) = [int(p.read_text()) for p in cluster.state.rglob(f"slurmd*{node}.pid")]
            os.kill(pid, signal.SIGKILL)
        assert len(alive(run, 0)) == 2
        until(lambda: (run / "logs" / "1").is_dir(), 120, lambda: report(run))
        until(lambda: not alive(run, 0), 30, lambda: report(run))
        told = (run / "logs" / "0" / "node_0.log").read_text()
        assert "this is start 0 of the run and" in told
        newest = max(checkpoints(run))
        until(lambda: max(checkpoints(run)) > newest, 240, lambda: report(run))
        assert not {"error", "killed", "bad_node"} & {line["cause"] for line in attempts(run)}
        assert "do not answer" not in (run / "logs" / "job.log").read_text()
        user.cookbook("cancel", run.name)
        ended(user, run, "CANCELLED")


def test_nodes_that_a_job_was_denied_before_are_not_counted_as_free(slurm, monkeypatch):
    nodes = slurm.run(["sinfo", "--noheader", "--Node", "--format=%N"]).stdout.split()
    first, second, *others = sorted(set(nodes))
    held = ["sbatch", "--parsable", "--hold", f"--exclude={first}", "--output=/dev/null"]
    job = slurm.run([*held, "--wrap", "true"]).stdout.strip()
    try:
        part = slurm.run(["squeue", "--noheader", f"--jobs={job}", "--format=%P"]).stdout.strip()
        env = slurm.env | {"SLURM_JOB_ID": job, "SLURM_JOB_PARTITION": part}
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        for wanted, enough in ((len(others), True), (len(others) + 1, False)):
            monkeypatch.setenv("SLURM_JOB_NUM_NODES", str(wanted))
            assert allocation.has_enough_without([second]) is enough, wanted
    finally:
        slurm.run(["scancel", job])
