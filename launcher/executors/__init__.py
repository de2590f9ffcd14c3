"""What runs a job script: Slurm, or this host. Nothing else knows which of them a run uses."""

from launcher.executors.job import Executor, Job, JobState, token
from launcher.executors.local import LocalExecutor
from launcher.executors.slurm.executor import SlurmExecutor
from runspec.states import LOCAL_PREFIX

__all__ = [
    "Executor",
    "Job",
    "JobState",
    "LocalExecutor",
    "SlurmExecutor",
    "choose",
    "executor_of",
    "title",
    "token",
]

_LOCAL, _SLURM = LocalExecutor(), SlurmExecutor()


def choose(local: bool) -> Executor:
    """Return the executor for a new job."""
    return _LOCAL if local else _SLURM


def executor_of(job_id: str | None) -> Executor:
    """Return the executor that runs a job."""
    return choose(str(job_id).startswith(LOCAL_PREFIX))


def title(job_id: str | None) -> str:
    """Return how messages name a job: "job 4711" or "process 4711"."""
    if executor_of(job_id) is _LOCAL:
        return f"process {str(job_id).removeprefix(LOCAL_PREFIX)}"
    return f"job {job_id}" if job_id else "no job"
