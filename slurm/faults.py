"""Why an attempt failed: what its ranks and nodes left in its log folder.

Standard library only.
"""

import os
import re
import socket
import time
from pathlib import Path
from typing import Any

from runspec import files
from runspec.storage import UNREADABLE
from slurm import words
from slurm.typed import well_typed

# What slurm/watchdog.py records: it has ended the ranks itself.
WATCHDOG = ("Hang", "NotStopped")
BAD_NODE = "BadNodeError"  # slurm/ready.py, and the trainer's own check
NODE_FAILURE = "NodeFailure"
STORAGE = "StorageError"
OUT_OF_MEMORY = "OutOfMemory"
# What ends the other ranks, in the order in which it explains the rest.
_FIRST = (*WATCHDOG, NODE_FAILURE, BAD_NODE, OUT_OF_MEMORY, "Killed")

# The connection to another rank broke: often that rank's own fault says why.
_OF_OTHERS = ("NetworkTimeout", "NetworkError", "PeerError")

# What NCCL's watchdog writes before it ends the rank.
_NCCL_TIMEOUT = re.compile(r"^.*Watchdog caught collective operation timeout.*$", re.MULTILINE)

# The end of a log that is searched.
_TAIL_BYTES = 65536

# What torchrun's ChildFailedError prints about a killed rank. SIGTERM is what torchrun and Slurm
# themselves send once something has failed, so it explains nothing.
_KILLED = re.compile(
    r"time +: (\S+)\n +host +: (\S+)\n +rank +: (\d+).*\n +exitcode +: -\d+ .*\((SIG(?!TERM)\w+)\)"
)

_ERRNO = re.compile(r"\[Errno (\d+)\]")

# The last line of a Python traceback, at the beginning of a line.
_EXCEPTION = re.compile(
    r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)): ?(.*)", re.MULTILINE
)


def read_errors(logs: Path) -> list[dict[str, Any]]:
    """Return what ranks and nodes left in an attempt's log folder, in no order."""
    records = map(files.read_json_or_none, logs.glob("error_*.json"))
    errors = [well_typed(record) for record in records if isinstance(record, dict)]
    errors += _of_peers(errors)
    for path in logs.glob("node_*.log"):
        errors += _killed_ranks(path)
    # A script of the user's own leaves no record: its traceback says what happened.
    return errors or [error for path in logs.glob("rank_*.log") for error in _exception(path)]


def first_error(errors: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the error that caused the others, None if there is none.

    A permanent one comes first, then what the watchdog ended, what the memory limit ended, a killed
    rank (the others report a broken connection, often sooner), then the earliest. Broken
    connections come last, and then a rank that only reports another's fault.
    """

    def order(error: dict[str, Any]) -> tuple[bool, int, float]:
        kind = str(error.get("type"))
        place = _FIRST.index(kind) if kind in _FIRST else len(_FIRST)
        if kind in _OF_OTHERS:
            place += 1 + _OF_OTHERS.index(kind)
        return not error.get("permanent"), place, float(error.get("time", 0))

    return min(errors, key=order, default=None)


def unfit(errors: list[dict[str, Any]]) -> list[str]:
    """Return the nodes that a check found unfit, and those that Slurm lost."""
    kinds = (BAD_NODE, NODE_FAILURE)
    return sorted({str(each["host"]) for each in errors if each.get("type") in kinds})


def describe(error: dict[str, Any]) -> str:
    """Return one line that names the rank, the node and the fault."""
    if error.get("type") in (*WATCHDOG, BAD_NODE):
        return str(error.get("message"))
    rank, host = error.get("rank"), error.get("host", "?")
    who = f"node {host}: " if host else ""
    if rank is not None:
        who = f"rank {rank} on {host}: "
    lines = str(error.get("message", "")).splitlines() or ["no message"]
    return f"{who}{error.get('type', 'error')}: {lines[0]}"


def fault(message: str) -> dict[str, Any]:
    """Return the record of a fault of this node that a retry cannot fix."""
    host, now = socket.gethostname(), time.time()
    return {"host": host, "time": now, "type": "fault", "message": message, "permanent": True}


def no_space(folder: Path, inodes: bool = False) -> dict[str, Any]:
    """Return the record of a disk that takes nothing more, or no more files.

    Nodes share it, so none is named.
    """
    message = f"no space left on the filesystem of {folder}: free some, or raise the quota"
    if inodes:
        message = (
            f"no inodes are left on the filesystem of {folder}, so it takes no new file: remove "
            "files, or raise the quota of their number"
        )
    return {**fault(message), "type": "NoSpace", "host": None}


def slurm_errors(job_log: str, logs: Path) -> list[dict[str, Any]]:
    """Return what Slurm says in the logs of job and nodes: a lost node, memory, a killed task."""
    lost = {"time": 0, "type": NODE_FAILURE, "message": "Slurm lost this node"}
    if nodes := words.lost_nodes(job_log):
        return [{**lost, "host": node} for node in nodes]
    if memory := _out_of_memory(job_log, logs):
        return [memory]
    first = words.first_task(job_log)
    if first and first[2].startswith("Killed"):
        message = f"torchrun (task {first[1]}) was killed"
        named = words.hosts(first[0])
        node = named[0] if len(named) == 1 else None
        return [{"host": node, "time": 0, "type": "Killed", "message": message}]
    return []


def _out_of_memory(job_log: str, logs: Path) -> dict[str, Any] | None:
    """Return the record of memory that ran out; its node is named, or has the log that says so."""
    texts = {None: job_log}
    texts |= {path: _tail(path) for path in sorted(logs.glob("node_*.log"))}
    said = {path: found for path, text in texts.items() if (found := words.out_of_memory(text))}
    if not said:
        return None
    path = next((path for path, (_, node) in said.items() if node), list(said)[-1])
    line, node = said[path]
    number = path.stem.removeprefix("node_") if path and not node else ""
    return {
        "host": node,
        "node_rank": int(number) if number.isdigit() else None,
        "time": 0,
        "type": OUT_OF_MEMORY,
        "message": f"{line}: raise resources.mem, or lower what the ranks keep in CPU memory",
    }


def on_nodes(
    errors: list[dict[str, Any]], hosts: list[str], ranks_per_node: int
) -> list[dict[str, Any]]:
    """Return the errors with Slurm's name of the node, which a rank's or a node's number gives.

    Several nodes may be on one host, and a host may have other names.
    """
    found = []
    for error in errors:
        rank = error.get("rank")
        index = rank // ranks_per_node if isinstance(rank, int) else error.get("node_rank")
        known = isinstance(index, int) and index < len(hosts)
        found.append({**error, "host": hosts[index]} if known else error)
    return found


def _of_peers(errors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what ranks say of others that left no record, as on a disk that is full."""
    own = {error.get("rank") for error in errors}
    said = {
        peer["rank"]: {**peer, "time": error.get("time", 0)}
        for error in errors
        for peer in error.get("peers") or []
        if isinstance(peer, dict) and isinstance(peer.get("rank"), int)
    }
    return [error for rank, error in said.items() if rank not in own]


def _killed_ranks(node_log: Path) -> list[dict[str, Any]]:
    found = []
    for when, host, rank, name in _KILLED.findall(_tail(node_log)):
        kind = "Killed"
        message = f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        said = _NCCL_TIMEOUT.search(_tail(node_log.with_name(f"rank_{rank}.log")))
        if name == "SIGABRT" and said:
            kind, message = "NetworkTimeout", said.group().strip()
        began = time.mktime(time.strptime(when, "%Y-%m-%d_%H:%M:%S"))
        each = {"rank": int(rank), "host": host, "time": began, "type": kind, "message": message}
        found.append(each)
    return found


def _exception(rank_log: Path) -> list[dict[str, Any]]:
    """Return the last exception in a rank's log."""
    found = _EXCEPTION.findall(_tail(rank_log))
    number = rank_log.stem.removeprefix("rank_")
    if not found or not number.isdigit():
        return []
    name, message = found[-1]
    number_of_error = _ERRNO.match(message)
    if number_of_error and int(number_of_error[1]) in UNREADABLE:
        name = STORAGE
    # A rank that lost its peers writes last; the one that failed by itself wrote before it.
    written = rank_log.stat().st_mtime
    host = socket.gethostname()
    return [{"rank": int(number), "host": host, "time": written, "type": name, "message": message}]


def _tail(log: Path) -> str:
    """Return the end of a log, "" if it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
