"""What Slurm says about the end of a job and of its steps, in the job's log.

Its state is COMPLETING by the time that the job script hears of the end; the lines that slurmstepd
and srun have written tell why. Standard library only.
"""

import re
import time
from pathlib import Path

# States that say that the job ends, and not why.
UNCLEAR = frozenset({"", "COMPLETING", "RUNNING", "UNKNOWN", "PENDING"})

# slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-22T13:00:53 DUE TO TIME LIMIT ***
# For a plain scancel nothing follows the time, or since 26.05 "DUE to SIGNAL Terminated".
_ENDED = (
    r"\*\*\* JOB {job} ON \S+ CANCELLED AT \S+"
    r"(?: DUE TO ([A-Z ]+)(?:,[^*]*)?| DUE to SIGNAL (?:Terminated|Killed))? ?\*\*\*"
)
_REASONS = {
    None: "CANCELLED",
    "TIME LIMIT": "TIMEOUT",
    "PREEMPTION": "PREEMPTED",
    "NODE FAILURE": "NODE_FAIL",
    "JOB REQUEUE": "REQUEUED",
}
# They come before the script's TERM, but through another process.
_WAIT_S = 3.0

# srun: error: n2: task 1: Killed
_TASK = re.compile(r"^srun: error: (\S+): tasks? ([\d,-]+): (.+)$", re.MULTILINE)

# srun: error: Node failure on n2, or on n[2-3]
_NODE_FAILURE = re.compile(r"^srun: error: Node failure on (\S+)", re.MULTILINE)

_OUT_OF_MEMORY = re.compile(
    r"^.*(?:oom[-_ ]kill|Out Of Memory|[Ee]xceeded (?:job |step )?memory limit).*$", re.MULTILINE
)
# slurmstepd-n1: error: ..., or srun: error: n1: task 0: Out Of Memory
_SPEAKER = re.compile(r"(?:slurmstepd-([\w.-]+): |srun: error: ([\w.-]+): tasks? [\d,-]+: )")

# Names with one list of numbers, as in n[01-03,7]-ib.
_HOSTS = re.compile(r"([^\s,\[\]]*)(?:\[([\d,-]+)\])?([^\s,\[\]]*)(?:,|$)")

# What srun says if it could not start a step because the controller did not answer, or because the
# job's last start, on a node that was given up, still has one.
_AWAY = re.compile(
    r"^srun: error: (.*(?:Unable to contact slurm controller|Socket timed out|"
    r"Unable to create step|"
    r"Unable to confirm allocation|Connection refused|Communication connection failure|"
    r"Zero Bytes were transmitted|controller not responding).*)$",
    re.MULTILINE | re.IGNORECASE,
)


def since(log: Path, start: int) -> str:
    """Return what a log holds from a byte on, "" if it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(start)
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def ended(text: str, job_id: str) -> str | None:
    """Return Slurm's state for the reason of a job's end: TIMEOUT, PREEMPTED, CANCELLED ..."""
    found = re.findall(_ENDED.format(job=re.escape(job_id)), text)
    return _REASONS.get(found[-1].strip() or None, found[-1]) if found else None


def wait_for_end(log: Path, start: int, job_id: str) -> str:
    """Return the same once the log says it, UNKNOWN if it does not within seconds."""
    deadline = time.monotonic() + _WAIT_S
    while (found := ended(since(log, start), job_id)) is None:
        if time.monotonic() >= deadline:
            return "UNKNOWN"
        time.sleep(0.1)
    return found


def first_task(text: str) -> tuple[str, str, str] | None:
    """Return node, task and end of the first task that srun reports, None if it reports none."""
    found = _TASK.search(text)
    return found.groups() if found else None  # type: ignore[return-value]


def lost_nodes(text: str) -> list[str]:
    """Return the nodes that Slurm lost while a step ran on them, each once."""
    return list(dict.fromkeys(name for said in _NODE_FAILURE.findall(text) for name in hosts(said)))


def hosts(names: str) -> list[str]:
    """Return the single names of Slurm's list of nodes, such as n[1-2],gpu7."""
    single = []
    for before, numbers, after in _HOSTS.findall(names):
        for span in numbers.split(","):
            first, _, last = span.partition("-")
            several = range(int(first), int(last or first) + 1) if first else [""]
            single += [f"{before}{str(each).zfill(len(first))}{after}" for each in several]
    return [name for name in single if name]


def out_of_memory(text: str) -> tuple[str, str | None] | None:
    """Return Slurm's line about a job or a step that used more memory than it has, and its node.

    The node is None if the line names none.
    """
    found = _OUT_OF_MEMORY.search(text)
    if not found:
        return None
    speaker = _SPEAKER.search(found.group())
    return found.group().strip(), (speaker[1] or speaker[2]) if speaker else None


def not_started(text: str) -> str:
    """Return srun's words if Slurm did not let it start a step, else ""."""
    found = _AWAY.search(text)
    return found.group(1) if found else ""
