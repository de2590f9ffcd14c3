"""Writes to the job's log, and reads from it why Slurm ended a job or its steps.

The job's state is COMPLETING when the job script learns of the end; the lines of slurmstepd and
srun give the reason.
"""

import os
import re
import time
from contextlib import suppress
from pathlib import Path

from slurm import allocation

# States that do not give the reason of an end.
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
# These lines are written before the script's TERM is sent, but by another process.
_WAIT_S = 3.0

# srun: error: n2: task 1: Killed
TASK = re.compile(r"^srun: error: (\S+): tasks? ([\d,-]+): (.+)$", re.MULTILINE)

# srun: error: Node failure on n2, or on n[2-3]
_NODE_FAILURE = re.compile(r"^srun: error: Node failure on (\S+)", re.MULTILINE)

_OUT_OF_MEMORY = re.compile(
    r"^.*(?:oom[-_ ]kill|Out Of Memory|[Ee]xceeded (?:job |step )?memory limit).*$", re.MULTILINE
)
# slurmstepd-n1: error: ..., or srun: error: n1: task 0: Out Of Memory
_SENDER = re.compile(r"(?:slurmstepd-([\w.-]+): |srun: error: ([\w.-]+): tasks? [\d,-]+: )")

# From srun if it could not start a step because the controller did not answer, or because the job's
# last start, on a node that was given up, still has one.
_NOT_STARTED = re.compile(
    r"^srun: error: (.*(?:Unable to contact slurm controller|Socket timed out|"
    r"Unable to create step|"
    r"Unable to confirm allocation|Connection refused|Communication connection failure|"
    r"Zero Bytes were transmitted|controller not responding).*)$",
    re.MULTILINE | re.IGNORECASE,
)


def say(message: str) -> None:
    """Write a line to the job's log, this process's output."""
    # It may be on a full disk.
    with suppress(OSError):
        print(f"{time.strftime('%H:%M:%S', time.gmtime())} cookbook: {message}", flush=True)


def since(log: Path, start: int) -> str:
    """Return a log's text from a byte on, "" if it cannot be read; start: negative from the end."""
    try:
        with log.open("rb") as file:
            file.seek(start if start >= 0 else max(0, file.seek(0, os.SEEK_END) + start))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def ended(text: str, job_id: str) -> str | None:
    """Return Slurm's state for the reason of a job's end: TIMEOUT, PREEMPTED, CANCELLED ..."""
    reasons = re.findall(_ENDED.format(job=re.escape(job_id)), text)
    return _REASONS.get(reasons[-1].strip() or None, reasons[-1]) if reasons else None


def wait_for_end(log: Path, start: int, job_id: str) -> str:
    """Return the same once it is in the log, UNKNOWN if it is not within seconds."""
    deadline = time.monotonic() + _WAIT_S
    while (state := ended(since(log, start), job_id)) is None:
        if time.monotonic() >= deadline:
            return "UNKNOWN"
        time.sleep(0.1)
    return state


def lost_nodes(text: str) -> list[str]:
    """Return the nodes that Slurm lost while a step ran on them, each once."""
    return list(dict.fromkeys(allocation.hosts_of(",".join(_NODE_FAILURE.findall(text)))))


def out_of_memory(text: str) -> tuple[str, str | None] | None:
    """Return Slurm's line about a job or step that used too much memory, and the node it names."""
    line = _OUT_OF_MEMORY.search(text)
    if not line:
        return None
    sender = _SENDER.search(line.group())
    return line.group().strip(), (sender[1] or sender[2]) if sender else None


def not_started(text: str) -> str:
    """Return srun's message if it could not start a step, else ""."""
    line = _NOT_STARTED.search(text)
    return line[1] if line else ""
