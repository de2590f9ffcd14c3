"""What cookbook cancel, resume and status do to a run's jobs, on a real Slurm and without training.

The job scripts write the records that a real one writes, and wait.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from launcher.executors import token
from launcher.runs.directory import Run
from tests.conftest import SlurmCluster
from tests.launcher.kit import Kit, until

NAME = "20260102-030405-demo-0a1b"
# As slurm/attempt.py begins an attempt; then it waits.
BODY = """
printf '{"state": "RUNNING", "job_id": "%s", "attempt": 0, "updated": 1, "cluster": "%s"}' \\
  "$SLURM_JOB_ID" "$SLURM_CLUSTER_NAME" >$RUN/.status && mv $RUN/.status $RUN/status.json
sleep 600
"""


def run_of(user: Kit, body: str = BODY, name: str = NAME) -> Run:
    """A run whose job script is body; cookbook resume starts it."""
    run = Run(user.root / "runs" / name)
    (run.path / "logs").mkdir(parents=True)
    script = (
        "#!/bin/bash",
        f"#SBATCH --comment={token(name)}",
        f"#SBATCH --output={run.path}/logs/job.log",
        f"RUN={run.path}",
        body,
    )
    (run.path / "job.sbatch").write_text("\n".join(script))
    return run


def resumed(user: Kit, run: Run) -> str:
    """Resume a run and return the id of the job that the command names."""
    done = user.cookbook("resume", run.name)
    assert done.returncode == 0, done.stderr
    (job_id,) = re.findall(r"as job (\d+)$", done.stdout.strip())
    return job_id


def jobs_of(slurm: SlurmCluster, run: Run) -> dict[str, str]:
    """The run's jobs that Slurm still has, and their states."""
    text = slurm.run(["squeue", "--noheader", "--states=all", "--format=%i|%T|%k"]).stdout
    rows = [line.split("|") for line in text.splitlines()]
    ended = ("CANCELLED", "FAILED", "COMPLETED")
    return {row[0]: row[1] for row in rows if row[2] == token(run.name) and row[1] not in ended}


def works(run: Run, job_id: str) -> bool:
    return run.status.get("job_id") == job_id and run.status.get("state") == "RUNNING"


def batch_script(run: Run, job_id: str) -> int:
    """The process of a job's script."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text()
            environ = (process / "environ").read_text(errors="replace")
        except OSError:
            continue
        if "slurm_script" in command and f"\0SLURM_JOB_ID={job_id}\0" in environ:
            return int(process.name)
    pytest.fail(f"job {job_id} of {run.name} has no script")


@pytest.fixture
def closed(slurm):
    """The partition starts no jobs."""
    yield lambda: slurm.run(["scontrol", "update", "partitionname=gpu", "state=down"])
    slurm.run(["scontrol", "update", "partitionname=gpu", "state=up"])


def test_a_cancel_ends_the_job_that_a_resume_made_after_a_killed_script(
    slurm, slurm_user: Kit, closed
) -> None:
    user, run = slurm_user, run_of(slurm_user)
    first = resumed(user, run)
    until(lambda: works(run, first), 30)
    os.kill(batch_script(run, first), signal.SIGKILL)
    until(lambda: first not in jobs_of(slurm, run), 30)
    told = user.status(run.path)
    assert told["state"] == "FAILED" and told["detail"].endswith(f"cookbook resume {NAME}")
    closed()
    second = resumed(user, run)
    assert second != first and jobs_of(slurm, run) == {second: "PENDING"}
    again = user.cookbook("resume", run.name)
    assert again.returncode == 2 and f"is PENDING (job {second}" in again.stderr
    assert f"cancelled {NAME} (job {second}); " in user.cookbook("cancel", run.name).stdout
    assert jobs_of(slurm, run) == {}
    assert user.status(run.path)["state"] == "CANCELLED"


def test_a_cancel_ends_jobs_that_were_submitted_by_hand_too(slurm, slurm_user: Kit, closed) -> None:
    user, run = slurm_user, run_of(slurm_user)
    closed()
    first = resumed(user, run)
    by_hand = slurm.run(["sbatch", "--parsable", str(run.path / "job.sbatch")]).stdout.strip()
    stranger = slurm.run(["sbatch", "--parsable", "--comment=mine", "--wrap=true"]).stdout.strip()
    cancelled = user.cookbook("cancel", run.name)
    assert f"(job {first} and job {by_hand})" in cancelled.stdout
    assert jobs_of(slurm, run) == {}
    shown = slurm.run(["squeue", "--noheader", f"--jobs={stranger}", "--format=%T"]).stdout
    assert shown.strip() == "PENDING"
    slurm.run(["scancel", stranger])
