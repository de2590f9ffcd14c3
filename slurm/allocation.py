"""What a job asks Slurm about its allocation, and has it do, by Slurm's own commands.

Standard library only.
"""

import os
import re
import subprocess
import time
from collections.abc import Sequence

# In sinfo's short states: such a node starts no job.
_AWAY = re.compile(r"down|drain|drng|fail|maint|unk|\*")


def ask(argv: Sequence[str], wait_s: float = 30) -> str | None:
    """Return what a command of Slurm prints, None if it fails or does not answer in time."""
    status, output = said(argv, wait_s)
    return None if status else output


def said(argv: Sequence[str], wait_s: float) -> tuple[int, str]:
    """Return a command's exit status and output; the error messages too if it fails."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=wait_s,
            check=False,
        )
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
    """Return a field of this job's description, "" if it is unknown.

    Args:
        job: the description, if it was just asked for.
    """
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
