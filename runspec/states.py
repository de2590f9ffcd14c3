"""What a job writes into status.json about itself: its state, and how a job without Slurm is named.

RUNNING       an attempt is running
RETRYING      an attempt has ended and the next one starts in the same job
REQUEUED      the job goes back into Slurm's queue and continues from its last checkpoint
INTERRUPTED   Slurm ended the job (TIMEOUT, PREEMPTED, NODE_FAIL ...); it may requeue it
COMPLETED, FAILED, CANCELLED   the run's end, until somebody resumes it
"""

from pathlib import Path

# What ends a run; every other state may still change.
FINAL = frozenset({"COMPLETED", "FAILED", "CANCELLED"})

# A job script that runs under bash on this host has this and its process id as job id.
LOCAL_PREFIX = "local-"


def process_start(pid: int) -> str | None:
    """Return when a process started, in ticks since boot; None if it has ended.

    With its id this identifies the process: the kernel gives an id to another one later.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]  # a zombie only waits for its parent
