"""Puts a job back into Slurm's queue. Standard library only."""

import os
import time
from collections.abc import Callable, Sequence

from slurm import allocation
from slurm.job_log import say
from slurm.recorder import Recorder, seconds


def requeue(record: Recorder, left_out: Sequence[str], lock: Callable[[bool], None]) -> None:
    """Put the job back into the queue, which ends this process.

    All state has been written before. Waits if the controller is down, or if Slurm is still
    cleaning up the job.

    Args:
        left_out: nodes that the next start does not get.
        lock: called with True before a TERM may come of the requeue itself, with False if it was
            refused.

    Raises:
        Follows: Slurm refused.
    """
    job, began, message, reported = os.environ["SLURM_JOB_ID"], time.monotonic(), "", False
    wait_s = seconds("CONTROLLER_WAIT_S", 600)
    while time.monotonic() - began <= wait_s:
        # Slurm may have just requeued it because it lost a node.
        known, restarts = allocation.description() or "", os.environ.get("SLURM_RESTART_COUNT")
        again = int(allocation.field("Restarts", known) or 0) > int(restarts or 0)
        if again or allocation.field("JobState", known) == "PENDING":
            return
        # Slurm accepts the list of excluded nodes only after the requeue, and from then on this
        # process has KillWait seconds left.
        lock(True)
        status, message = allocation.said(["scontrol", "requeue", job], 60)
        message = message.strip()
        if status == 0:
            if left_out and not allocation.exclude(job, left_out):
                what = f"Slurm did not exclude {','.join(left_out)}"
                say(f"{what}: the next attempt may use it again")
            return
        lock(False)
        if any(word in message for word in ("Invalid job id", "denied", "disabled")):
            break
        # Without output, Slurm's TERM may have ended scontrol.
        if message and not reported:
            what = f"waiting to go back into the queue, up to {wait_s:.0f} s"
            record.waiting(f"{what}: {message}")
            reported = True
        time.sleep(2)
    raise record.fail(
        f"Slurm refused to requeue job {job} ({message}): continue with: "
        f"cookbook resume {record.run_dir.name}"
    )
