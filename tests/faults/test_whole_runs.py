"""Whole runs that are killed, stopped, cancelled or moved: each ends like the undisturbed one."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.faults.conftest import user_of
from tests.faults.kit import (
    SHORT,
    Undisturbed,
    attempts,
    ended,
    lose_node,
    rank,
    trains,
)
from tests.launcher.kit import Kit, checkpoints, ranks_of, report, until


@pytest.mark.long
def test_a_killed_rank_is_named_and_costs_no_result(user: Kit, undisturbed: Undisturbed):
    _, run = user.submit(*SHORT)
    trains(run)
    # A retry needs train.yaml only.
    (run / "recipe.yaml").unlink()
    os.kill(rank(run, 1), signal.SIGKILL)
    first, second = ended(user, run, "COMPLETED")
    assert first["cause"] == "killed" and first["message"].startswith("rank 1 on"), first
    assert second["cause"] == "finished"
    assert first["job_id"] == second["job_id"], "retried inside the allocation"
    told = user.cookbook("logs", run.name, "--first-error").stdout
    assert told.startswith(f"attempt 0 of {run.name} failed: killed: rank 1 on n2: Killed"), told
    assert f"==> {run / 'logs/0/node_1.log'}, the last 30 lines <==" in told
    undisturbed.is_equalled_by(run)


@pytest.mark.long
def test_the_warning_before_the_time_limit_saves_and_requeues(
    user: Kit, slurm, undisturbed: Undisturbed
):
    job, run = user.submit(*SHORT)
    trains(run)
    slurm.run(["scancel", "--batch", "--signal=USR1", job])
    first, second = ended(user, run, "COMPLETED")
    assert first["cause"] == "time_limit" and first["checkpoint_step"] > 0, first
    assert (first["restart_count"], second["restart_count"]) == (0, 1)
    undisturbed.is_equalled_by(run)


@pytest.mark.long
def test_a_cancelled_run_ends_and_goes_on_when_asked(user: Kit, undisturbed: Undisturbed):
    job, run = user.submit(*SHORT)
    trains(run)
    assert "cancelled" in user.cookbook("cancel", job).stdout
    ended(user, run, "CANCELLED")
    resumed = user.cookbook("resume", run.name)
    assert resumed.returncode == 0, resumed.stderr
    again = user.cookbook("resume", run.name)
    assert again.returncode == 2 and "follow it with" in again.stderr
    ended(user, run, "COMPLETED")
    undisturbed.is_equalled_by(run)


@pytest.mark.long
def test_a_job_submitted_by_hand_does_the_same(user: Kit, slurm, undisturbed: Undisturbed):
    job, run = user.submit(*SHORT, "--name", "by-hand")
    slurm.run(["scontrol", "hold", job])
    slurm.run(["scancel", job])
    until(lambda: not ranks_of(run), 30)
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    by_hand = slurm.run(["sbatch", "--wait", str(run / "job.sbatch")], timeout=180)
    assert by_hand.returncode == 0, report(run)
    assert user.status(run)["state"] == "COMPLETED"
    undisturbed.is_equalled_by(run)


@pytest.mark.long
def test_without_slurm_the_same_script_runs_here(
    user: Kit, undisturbed: Undisturbed, tmp_path: Path
):
    other = Kit(user.env | {"COOKBOOK_ROOT": str(tmp_path)}, tmp_path)
    shutil.copytree(user.root / "models", tmp_path / "models")
    done = other.cookbook("submit", *SHORT, "--local", "--watch")
    assert done.returncode == 0, done.stdout + done.stderr
    undisturbed.is_equalled_by(other.runs()[0])
    _, second = other.submit(*SHORT, "--local")
    until(lambda: checkpoints(second), 90, lambda: report(second))
    assert "cancelled" in other.cookbook("cancel", second.name).stdout
    assert other.status(second)["state"] == "CANCELLED"
    until(lambda: not ranks_of(second), 30)


@pytest.mark.long
def test_a_lost_node_costs_no_result(root: Path, new_cluster, undisturbed: Undisturbed):
    shape = ["--requeue-delay", "5", "--set", "SlurmdTimeout=6"]
    with new_cluster("loss", *shape) as cluster:
        user = user_of(cluster, root)
        job, run = user.submit(*SHORT)
        trains(run)
        lose_node(cluster, "n2", job)
        # The node comes back: up starts daemons that have died.
        cluster.start_dead_daemons()
        user.wait(run, "COMPLETED", "FAILED")
        told = attempts(run)
        assert told[-1]["cause"] == "finished" and len(told) > 1, report(run)
        undisturbed.is_equalled_by(run)


@pytest.mark.long
def test_a_refused_requeue_names_the_command_that_continues(
    user: Kit, slurm, undisturbed: Undisturbed
):
    job, run = user.submit(*SHORT)
    trains(run)
    slurm.run(["scontrol", "update", f"JobId={job}", "Requeue=0"])
    slurm.run(["scancel", "--batch", "--signal=USR1", job])
    (line,) = ended(user, run, "FAILED")
    assert (line["job_id"], line["cause"]) == (job, "time_limit"), report(run)
    again = f"continue with: cookbook resume {run.name}"
    assert again in user.status(run)["detail"]
    assert user.cookbook("resume", run.name).returncode == 0
    ended(user, run, "COMPLETED")
    undisturbed.is_equalled_by(run)
