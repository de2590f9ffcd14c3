"""Jobs in Slurm: submit, test, list, account for and cancel them."""

import os
import re
import tempfile
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import SlurmFault, SlurmTimeout
from launcher.slurm.command import run

# Slurm's words for a job's state (slurm.h): a job in any other state may still run.
HELD = frozenset(["REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"])
_ENDED = (
    "COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL OUT_OF_MEMORY BOOT_FAIL DEADLINE PREEMPTED "
    "REVOKED LAUNCH_FAILED RECONFIG_FAIL"
)
ENDED = frozenset(_ENDED.split())

_JOB_ID = re.compile(r"\d+\Z")


@dataclass(frozen=True)
class QueuedJob:
    """A job as squeue reports it."""

    job_id: str
    state: str
    reason: str = ""
    nodes: str = ""
    start: str = ""
    comment: str = ""


def submit(script: Path, token: str, lease: int, earlier: Collection[str], after: str = "") -> str:
    """Submit a script and return its job id; exactly one job exists afterwards, or none.

    sbatch keeps the file lease open: if this process is killed, a lock on it stays until then.

    A controller that hangs may have taken the job although sbatch timed out. So the queue is
    searched for the run's token (the job's comment) before sbatch is tried again.

    Args:
        earlier: ids of jobs that have the token too, and are not the one that this makes.
        after: the id of a job that has to end before this one begins.
    """
    options = [f"--comment={token}", *[f"--dependency=afterany:{after}"] * bool(after)]
    argv = ["sbatch", "--parsable", *options, str(script)]
    for _ in range(3):
        try:
            answer = run(argv, timeout_s=60, lease=lease)
        except SlurmTimeout:
            if known := _wait_for_token(token, earlier):
                return known
            continue
        job_id = answer.strip().rpartition("\n")[2].split(";")[0]
        if not _JOB_ID.match(job_id):
            raise SlurmFault(
                f"sbatch answered {answer.strip()!r}, which is no job id: look with: squeue --me"
            )
        return job_id
    raise SlurmTimeout(
        "sbatch timed out three times and no job was made: check whether scontrol ping answers"
    )


def _wait_for_token(token: str, earlier: Collection[str]) -> str | None:
    """Return the new job's id, None if there is none, once Slurm answers; it has the token."""
    answers = 0
    for pause_s in (0, 3, 3, 5, 10, 20):
        time.sleep(pause_s)
        try:
            # Any state: a short job may have ended while sbatch waited.
            job_ids = {job.job_id for job in queue() if job.comment == token}.difference(earlier)
        except SlurmTimeout:
            continue
        if job_ids:
            return max(job_ids, key=int)
        # A controller that wakes up may answer this question before it reads sbatch's request.
        answers += 1
        if answers == 2:
            return None
    raise SlurmTimeout(
        "the controller does not answer and may hold a job of this run; once it answers, look "
        f"with: squeue --me --states=all --format='%i %k' | grep {token}"
    )


def test_only(script: str) -> str:
    """Return when and where Slurm would start a script; SlurmFault with its words if it would not.

    The script is not queued. Slurm also refuses it while the nodes that it needs are down.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch", encoding="utf-8") as file:
        file.write(script)
        file.flush()
        # It answers on standard error.
        return run(["sbatch", "--test-only", file.name], merged=True).strip()


def queue() -> list[QueuedJob]:
    """Return this user's jobs, those that ended recently too, in one question to the controller."""
    # A job's name may hold anything, even newlines: only fields that cannot are asked for. The
    # comment comes last, and a row of another form is ignored.
    argv = ["squeue", "--noheader", "--states=all", f"--user={os.getuid()}"]
    argv.append("--format=%i|%T|%r|%N|%S|%k")
    rows = (line.split("|", 5) for line in run(argv).splitlines())
    return [
        QueuedJob(*(value.strip() for value in row))
        for row in rows
        if len(row) == 6 and _JOB_ID.match(row[0])
    ]


def accounting(job_ids: Iterable[str]) -> dict[str, str]:
    """Return the states that sacct knows for these jobs; {} if accounting is off."""
    wanted = sorted(set(job_ids))
    if not wanted:
        return {}
    argv = ["sacct", "--allocations", "--noheader", "--parsable2", "--format=JobID,State"]
    try:
        text = run([*argv, f"--jobs={','.join(wanted)}"], timeout_s=20)
    except SlurmFault:
        return {}
    rows = (line.partition("|")[::2] for line in text.splitlines())
    # Such as "CANCELLED by 1000"
    return {job: state.split()[0].rstrip("+") for job, state in rows if job in wanted and state}


def cancel(job_ids: Sequence[str]) -> None:
    """Cancel jobs; Slurm reports no error for a job that it has forgotten."""
    run(["scancel", *job_ids])
