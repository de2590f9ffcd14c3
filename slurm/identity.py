"""Which job this is: Slurm's, or a process of this host without Slurm.

Standard library only.
"""

import os
import socket
from typing import Any

from runspec.states import LOCAL_PREFIX, process_start


def own_job_id() -> str:
    """Return the id of this job, or of this process on a host without Slurm."""
    return os.environ.get("SLURM_JOB_ID") or f"{LOCAL_PREFIX}{os.environ['JOB_PID']}"


def this_job() -> dict[str, Any]:
    """Return what identifies this start of this job: two clusters may give the same id."""
    named = {
        "cluster": os.environ.get("SLURM_CLUSTER_NAME"),
        "slurm_conf": os.environ.get("SLURM_CONF"),
    }
    return {
        "job_id": own_job_id(),
        "restart_count": int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        **({key: value for key, value in named.items() if value} if in_slurm() else {}),
    }


def in_slurm() -> bool:
    return "SLURM_JOB_ID" in os.environ


def this_process() -> dict[str, Any]:
    """Return the same, and without Slurm what identifies the job's process."""
    if in_slurm():
        return this_job()
    started = process_start(int(os.environ["JOB_PID"]))
    return {**this_job(), "host": socket.gethostname(), "process_start": started}


def process_ended(status: dict[str, Any]) -> bool:
    """Whether the attempt ran without Slurm, and its process is not on this host any more."""
    job_id = str(status.get("job_id"))
    if not job_id.startswith(LOCAL_PREFIX):
        return False
    started = process_start(int(job_id.removeprefix(LOCAL_PREFIX)))
    return started is None or started != status.get("process_start")


def owned(status: dict[str, Any], attempt: int | None = None) -> bool:
    """Whether the status belongs to this start of this job, or to no job at all.

    A job whose node was lost may still run beside the job that replaced it.
    """
    newer = attempt is not None and int(status.get("attempt", -1)) > attempt
    return "job_id" not in status or (not newer and same_start(status))


def is_of_this_start(status: dict[str, Any]) -> bool:
    """Whether a status was written by this start of this job, and by this very process of it."""
    return this_process().items() <= status.items()


def same_start(record: dict[str, Any]) -> bool:
    """Whether a record was written by this start of this job."""
    mine, keys = this_job(), ("job_id", "restart_count")
    return all(str(record.get(key, mine[key])) == str(mine[key]) for key in keys)


def ranks_per_node() -> int:
    return max(1, int(os.environ.get("RANKS_PER_NODE", "1")))


def gpus() -> int:
    """Number of GPUs of the allocation, or of ranks."""
    here = int(os.environ.get("NODES") or 1) + int(os.environ.get("ROLLOUT_NODES") or 0)
    return int(os.environ.get("SLURM_JOB_NUM_NODES") or here) * ranks_per_node()
