"""Puts a job back into Slurm's queue, or lets another job continue its run.

Standard library only.
"""

import os
import time
from collections.abc import Callable, Sequence

from runspec import files
from slurm import allocation, records
from slurm.job_log import say
from slurm.recorder import Recorder, seconds

# Exit status: the job has failed for Slurm, so that the one that takes its place starts.
SUCCEEDED = 75


def requeue(record: Recorder, left_out: Sequence[str], lock: Callable[[bool], None]) -> int:
    """Put the job back into the queue, which ends this process; return the exit status.

    All state has been written before. Waits if the controller is down, or if Slurm is still
    cleaning up the job. If Slurm refuses, another job takes this one's place.

    Args:
        left_out: nodes that the next start does not get.
        lock: called with True before a TERM may come of the requeue itself, with False if it was
            refused.

    Raises:
        Follows: Slurm takes neither this job nor another.
    """
    job, began, message, reported = os.environ["SLURM_JOB_ID"], time.monotonic(), "", False
    wait_s = seconds("CONTROLLER_WAIT_S", 600)
    while time.monotonic() - began <= wait_s:
        # Slurm may have just requeued it because it lost a node.
        known, restarts = allocation.description() or "", os.environ.get("SLURM_RESTART_COUNT")
        again = int(allocation.field("Restarts", known) or 0) > int(restarts or 0)
        if again or allocation.field("JobState", known) == "PENDING":
            return 0
        # Slurm accepts the list of excluded nodes only after the requeue, and from then on this
        # process has KillWait seconds left.
        lock(True)
        status, message = allocation.said(["scontrol", "requeue", job], 60)
        message = message.strip()
        if status == 0:
            if left_out and not allocation.exclude(job, left_out):
                what = f"Slurm did not exclude {','.join(left_out)}"
                say(f"{what}: the next attempt may use it again")
            return 0
        lock(False)
        if any(word in message for word in ("Invalid job id", "denied", "disabled")):
            break
        # Without output, Slurm's TERM may have ended scontrol.
        if message and not reported:
            what = f"waiting to go back into the queue, up to {wait_s:.0f} s"
            record.waiting(f"{what}: {message}")
            reported = True
        time.sleep(2)
    other, refused = allocation.submit_successor(record.run_dir / files.JOB_SCRIPT, left_out)
    if other is None:
        raise record.fail(
            f"Slurm refused to requeue job {job} ({message}), and to take another "
            f"({refused or 'sbatch did not answer'}): continue with: "
            f"cookbook resume {record.run_dir.name}"
        )
    record(records.between, successor=other)
    say(f"job {other} takes the place of this one: it continues from the last checkpoint")
    return SUCCEEDED
