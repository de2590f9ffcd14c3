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

# Exit status: the job has failed for Slurm, so that its successor starts.
SUCCEEDED = 75


class Succession:
    """The successor of a job: another one in the queue, which starts if this one fails.

    job: its id, "" for none.
    """

    def __init__(self, record: Recorder) -> None:
        self._record, self.job = record, ""

    def submit(self, left_out: Sequence[str]) -> str:
        """Submit it, without these nodes; return "", or Slurm's message if it refuses."""
        script = self._record.run_dir / files.JOB_SCRIPT
        job, message = allocation.submit_successor(script, left_out)
        if job is None:
            return message or "sbatch did not answer"
        self.job = job
        self._record(records.between, successor=job)
        return ""

    def drop(self) -> None:
        """Cancel it: the run has ended."""
        if self.job:
            allocation.ask(["scancel", self.job])

    def requeue(self, left_out: Sequence[str], lock: Callable[[bool], None]) -> int:
        """Put the job back into the queue, which ends this process; return the exit status.

        All state has been written before. Waits if the controller is down, or if Slurm is still
        cleaning up the job.

        Args:
            left_out: nodes that the next start does not get.
            lock: called with True before a TERM may come of the requeue itself, with False if it
                was refused.

        Raises:
            Follows: Slurm takes neither this job nor another.
        """
        if self.job:
            return self._succeed(left_out)
        job, began, message, reported = os.environ["SLURM_JOB_ID"], time.monotonic(), "", False
        wait_s = seconds("CONTROLLER_WAIT_S", 600)
        while time.monotonic() - began <= wait_s:
            # Slurm may have just requeued it because it lost a node.
            known, restarts = allocation.description() or "", os.environ.get("SLURM_RESTART_COUNT")
            again = int(allocation.field("Restarts", known) or 0) > int(restarts or 0)
            if again or allocation.field("JobState", known) == "PENDING":
                return 0
            # Slurm accepts the list of excluded nodes only after the requeue, and from then on
            # this process has KillWait seconds left.
            lock(True)
            status, message = allocation.said(["scontrol", "requeue", job], 60)
            message = message.strip()
            if status == 0:
                self._exclude(job, left_out)
                return 0
            lock(False)
            if any(word in message for word in ("Invalid job id", "denied", "disabled")):
                break
            # Without output, Slurm's TERM may have ended scontrol.
            if message and not reported:
                what = f"waiting to go back into the queue, up to {wait_s:.0f} s"
                self._record.waiting(f"{what}: {message}")
                reported = True
            time.sleep(2)
        if not (refused := self.submit(left_out)):
            return self._succeed(left_out)
        raise self._record.fail(
            f"Slurm refused to requeue job {job} ({message}), and to take another ({refused}): "
            f"continue with: cookbook resume {self._record.run_dir.name}"
        )

    def _succeed(self, left_out: Sequence[str]) -> int:
        what = f"job {self.job} takes the place of this one"
        say(f"{what}: it continues from the last checkpoint")
        self._exclude(self.job, left_out)
        return SUCCEEDED

    def _exclude(self, job: str, nodes: Sequence[str]) -> None:
        if nodes and not allocation.exclude(job, nodes):
            say(f"Slurm did not exclude {','.join(nodes)}: the next attempt may use it again")
