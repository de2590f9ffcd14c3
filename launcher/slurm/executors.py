"""What runs a job script: Slurm, or this host. Nothing else knows which of them a run uses."""

from launcher.slurm.executor import SlurmExecutor
from launcher.slurm.job import Executor
from launcher.slurm.local import LocalExecutor
from runspec.states import LOCAL_PREFIX

_LOCAL, _SLURM = LocalExecutor(), SlurmExecutor()


def choose(local: bool = False) -> Executor:
    """Return the executor for a new job, by the option --local."""
    return _LOCAL if local else _SLURM


def named(name: str) -> Executor:
    """Return the executor with this name."""
    return choose(name == _LOCAL.name)


def executor_of(job_id: str | None) -> Executor:
    """Return the executor that runs a job."""
    return choose(str(job_id).startswith(LOCAL_PREFIX))


def title(job_id: str | None) -> str:
    """Return how messages name a job: "job 4711" or "process 4711"."""
    return executor_of(job_id).title(job_id)
