"""What follows when an attempt has ended: the run is finished, it fails, or another attempt starts.

slurm/attempt.py collects the facts, slurm/job.sh does what is decided. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slurm.faults import describe, first_error

# By the type of the error that ended the attempt.
_CAUSES = {"Killed": "killed", "Hang": "hang", "NotStopped": "time_limit"}


@dataclass(frozen=True)
class Verdict:
    """How an attempt ended, and what the job script does next.

    state: a word of runspec.states. next: finished, failed, run (again, on these nodes) or requeue.
    """

    state: str
    next: str
    cause: str
    message: str = ""


def decide(
    exit_code: int,
    progress: dict[str, Any],
    errors: list[dict[str, Any]],
    stop_asked: bool,
    cancelled: bool,
    job_state: str | None,
    can_requeue: bool,
    fruitless: int,
    max_retries: int,
    timed_out_s: float | None = None,
) -> Verdict:
    """Judge one attempt.

    Args:
        progress: the trainer's progress.json, {} if the entry writes none.
        errors: what ranks and nodes recorded.
        stop_asked: the time limit is near, so the ranks were asked to save and stop.
        cancelled: `cookbook cancel` ended the job.
        job_state: Slurm's word for the job if Slurm is ending it, else None.
        fruitless: how many attempts in a row, this one included, brought no newer checkpoint.
        timed_out_s: the recipe's timeout if the attempt reached it.
    """
    trained = progress.get("state")
    if exit_code == 0 and trained in (None, "finished"):
        return Verdict("COMPLETED", "finished", "finished")

    # Somebody ended it: no retry.
    if cancelled or job_state == "CANCELLED":
        who = "by cookbook cancel" if cancelled else "its job was cancelled"
        return Verdict("CANCELLED", "failed", "cancelled", who)
    if job_state is not None:
        # Slurm itself requeues a job that it ends for lack of nodes.
        message = f"Slurm ended the job: {job_state}"
        return Verdict("INTERRUPTED", "failed", job_state.lower(), message)
    if timed_out_s is not None:
        message = f"ended by the recipe's timeout of {timed_out_s:.0f} s"
        return Verdict("FAILED", "failed", "timeout", message)

    # Why it ended.
    first, stopped = first_error(errors), stop_asked or trained == "stopped"
    if first:
        cause, message = _CAUSES.get(str(first.get("type")), "error"), describe(first)
    elif stopped:
        cause, message = "time_limit", "stopped before the time limit"
    else:
        cause, message = "killed", f"exit status {exit_code}, and no rank recorded an error"

    # What a retry cannot fix, or has not fixed often enough.
    if first and first.get("permanent"):
        return Verdict("FAILED", "failed", cause, message)
    if fruitless > max_retries:
        message += f"; {fruitless} attempts brought no new checkpoint" if max_retries else ""
        return Verdict("FAILED", "failed", cause, message)

    if stopped and can_requeue:
        return Verdict("REQUEUED", "requeue", cause, message)
    return Verdict("RETRYING", "run", cause, message)
