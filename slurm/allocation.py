"""Which job this is, Slurm's or a process of this host, and what it asks Slurm or has it do."""

import os
import re
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from runspec.states import LOCAL_PREFIX, process_start

# In sinfo's short states: such a node starts no job.
_AWAY = re.compile(r"down|drain|drng|fail|maint|unk|\*")


def own_job_id() -> str:
    """Return the id of this job, or of this process on a host without Slurm."""
    return os.environ.get("SLURM_JOB_ID") or f"{LOCAL_PREFIX}{os.environ['JOB_PID']}"


def this_job() -> dict[str, Any]:
    """Return what identifies this start of this job: two clusters may give the same id."""
    named = {"cluster": "SLURM_CLUSTER_NAME", "slurm_conf": "SLURM_CONF"} if in_slurm() else {}
    mine = {key: os.environ[name] for key, name in named.items() if os.environ.get(name)}
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    return {"job_id": own_job_id(), "restart_count": restarts, **mine}


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


# Slurm's commands -------------------------------------------------------------------------------


def ask(argv: Sequence[str], wait_s: float = 30) -> str | None:
    """Return what a command of Slurm prints, None if it fails or does not answer in time."""
    status, output = said(argv, wait_s)
    return None if status else output


def said(argv: Sequence[str], wait_s: float) -> tuple[int, str]:
    """Return a command's exit status and output; the error messages too if it fails."""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=wait_s)
    except subprocess.TimeoutExpired as late:
        status, words = 124, (late.stdout or b"") + (late.stderr or b"")
    except OSError as error:
        status, words = 127, str(error).encode()
    else:
        status, words = done.returncode, done.stdout + done.stderr * (done.returncode != 0)
    return status, words.decode(errors="replace")


def hosts_of(names: str) -> list[str]:
    """Return the single names of Slurm's list of nodes, such as n[1-2],gpu7."""
    if "[" not in names:
        return [name for name in names.split(",") if name]
    return (ask(["scontrol", "show", "hostnames", names]) or names).split()


def description() -> str | None:
    """Return Slurm's description of this job, None if the controller does not answer."""
    return ask(["scontrol", "--oneliner", "show", "job", os.environ["SLURM_JOB_ID"]], 20)


def field(name: str, job: str | None = None) -> str:
    """Return a field of this job's description, which may be given as job, "" if unknown."""
    match = re.search(rf" {name}=(\S*)", (description() if job is None else job) or "")
    return match[1] if match and match[1] != "(null)" else ""


def job_exists(job_id: str) -> bool:
    """Whether Slurm knows a job, or does not answer."""
    status, output = said(["squeue", "--noheader", f"--jobs={job_id}", "--format=%T"], 60)
    return bool(output.strip()) if status == 0 else "Invalid job id" not in output


def addresses(hosts: Sequence[str]) -> list[str]:
    """Return the addresses that Slurm's daemons use between the nodes, [] if it names none.

    On the node itself its name may resolve to 127.0.1.1, and other nodes may not be able to resolve
    its host name.
    """
    printed = ask(["scontrol", "--oneliner", "show", "node", ",".join(hosts)]) or ""
    return re.findall(r" NodeAddr=(\S+)", printed)


def answers(hosts: Sequence[str]) -> str | None:
    """Return None if Slurm starts a step on each of these nodes, else its message.

    --overlap shares no memory with a step that Slurm still cleans up, hence --mem=0.
    """
    count, nodes = len(hosts), ",".join(hosts)
    argv = ["srun", "--overlap", "--mem=0", f"--nodes={count}", f"--nodelist={nodes}"]
    status, output = said([*argv, f"--ntasks={count}", "--ntasks-per-node=1", "true"], 30)
    return output if status else None


def excluded(more: Sequence[str] = ()) -> str:
    """Return the nodes that this job excludes, and additional ones, as --exclude takes them."""
    return ",".join(filter(None, [field("ExcNodeList"), *more]))


def has_enough_without(hosts: Sequence[str]) -> bool:
    """Whether the job's partition has enough nodes without these and those that it excludes."""
    bad = {*hosts, *hosts_of(excluded(hosts))}
    partition = os.environ["SLURM_JOB_PARTITION"]
    argv = ["sinfo", "--noheader", "--Node", f"--partition={partition}", "--format=%N %t"]
    lines = (line.split() for line in (ask(argv) or "").splitlines())
    others = {node for node, state in lines if node not in bad and not _AWAY.search(state)}
    return len(others) >= int(os.environ["SLURM_JOB_NUM_NODES"])


def exclude(job_id: str, hosts: Sequence[str]) -> bool:
    """Exclude these nodes for a job in the queue; return whether Slurm did."""
    for pause_s in (0.1, 0.2, 0.3):
        argv = ["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={excluded(hosts)}"]
        if ask(argv, 60) is not None:
            return True
        time.sleep(pause_s)
    return False
