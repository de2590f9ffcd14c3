"""The job of a run, and what an executor does with it: start it, report its state, cancel it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


def token(run: str) -> str:
    """Return the mark of a run's jobs: Slurm keeps it in their comment, where it is searched."""
    return f"cookbook:{run}"


@dataclass(frozen=True)
class Job:
    """The newest job of a run.

    job_id is None if nobody wrote it down: the token finds such a job in Slurm's queue. host and
    process_start (ticks since boot) are those of a job that runs without Slurm; cluster, controller
    and slurm_conf say where Slurm has it, None if nobody wrote that down.
    """

    token: str
    job_id: str | None = None
    host: str | None = None
    process_start: str | None = None
    cluster: str | None = None
    controller: str | None = None
    slurm_conf: str | None = None


@dataclass(frozen=True)
class State:
    """The state of a job, or of a run, and where it comes from.

    word: the state that a user sees; "" if an executor knows nothing of a job. source: status.json,
    squeue, sacct, this host or nobody. detail: why it waits, where it runs, or how it ended. ended:
    no job runs or waits, though Slurm may requeue one a moment later. job_id: that of the newest
    job. elsewhere: that job belongs to another host or cluster, and only there can it be asked for.
    """

    word: str
    source: str
    detail: str = ""
    ended: bool = False
    job_id: str | None = None
    elsewhere: bool = False


class Executor(Protocol):
    """What runs job scripts: Slurm, or this host.

    name: as it is recorded. queued: its jobs wait in a queue, whose limits can be checked; else
    they start on this host at once.
    """

    name: str
    queued: bool

    def title(self, job_id: str | None) -> str:
        """Return how messages name a job: "job 4711" or "process 4711"."""

    def start(
        self, script: Path, token: str, lease: int, earlier: Collection[str], after: str = ""
    ) -> dict[str, Any]:
        """Start a job script and return what finds the job again: fields of a Job.

        lease is the open file that locks the run: it stays locked until the job is there, or
        nothing can make it any more, even if this process is killed. earlier: the ids of the jobs
        that the run has had. after: the id of a job that has to end before this one begins.

        Raises:
            SlurmFault: Slurm refused the script, and there is no job.
            SlurmTimeout: there may be a job.
            OSError: the script cannot be started here.
        """

    def states(self, jobs: Sequence[Job]) -> Mapping[str, State]:
        """Return the state of each job by its token.

        Raises:
            SlurmFault: Slurm cannot be asked.
        """

    def living(self, job: Job, unsure: bool = False) -> dict[str, str]:
        """Return every job of the run that waits or runs, and its state, oldest first.

        unsure: one may appear a moment later, because somebody died while it was made.

        Raises:
            SlurmFault: Slurm cannot be asked.
            RunFault: the run's job belongs to another host or cluster.
        """

    def cancel(self, job: Job, job_ids: Sequence[str]) -> None:
        """End jobs of the run. A job that has ended already is no error.

        Raises:
            SlurmFault: Slurm did not end them.
        """
