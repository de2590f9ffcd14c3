"""Why an attempt failed: what its ranks and nodes left in its log folder."""

import os
import re
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from runspec import files
from runspec.failure import fault
from runspec.storage import OF_A_DISK, UNREADABLE, patiently
from slurm import allocation, job_log

# Recorded by slurm/watchdog.py, by which the ranks were ended.
WATCHDOG = ("Hang", "NotStopped")
BAD_NODE = "BadNodeError"  # slurm/ready.py, and the trainer's own check
NODE_FAILURE = "NodeFailure"
STORAGE = "StorageError"
OUT_OF_MEMORY = "OutOfMemory"
# How long the job script waits for storage that cannot be read: Slurm may kill it after 30 s.
WAIT_S = 5.0
# Types in the order in which they explain the rest; None for those that are not named here. If the
# connection to another rank broke, often that rank's own fault says why.
_FIRST = (*WATCHDOG, NODE_FAILURE, BAD_NODE, OUT_OF_MEMORY, "Killed")
_ORDER = (*_FIRST, None, "NetworkTimeout", "NetworkError", "PeerError")

# What NCCL's watchdog writes before it ends the rank.
_NCCL_TIMEOUT = re.compile(r"^.*Watchdog caught collective operation timeout.*$", re.MULTILINE)

# The end of a log that is searched, and what the last records of a run may take.
_TAIL_BYTES = _LAST_BYTES = 65536

# What torchrun's ChildFailedError prints about a killed rank. SIGTERM is what torchrun and Slurm
# themselves send once something has failed, so it explains nothing.
_KILLED = re.compile(
    r"time +: (\S+)\n +host +: (\S+)\n +rank +: (\d+).*\n +exitcode +: -\d+ .*\((SIG(?!TERM)\w+)\)"
)

# A process cannot know who sent it SIGKILL.
SIGKILL = (
    "killed by SIGKILL: probably the node ran out of CPU memory (raise resources.mem), or somebody "
    "ended the process"
)

# What srun says of a task that a signal ended; TERM explains nothing, as above.
_FATAL = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE")
_SIGNALS = {str(signal.strsignal(signal.Signals[name])): name for name in _FATAL}

# What torch puts before a traceback of a rank that is in a process group.
_PREFIX = re.compile(r"^\[rank\d+\]:(?: |$)", re.MULTILINE)

_ERRNO = re.compile(r"\[Errno (\d+)\]")

# A Python traceback: its frames, the exception and its message.
_TRACEBACK = re.compile(
    r"^Traceback \(most recent call last\):\n((?:[ \t].*\n)+)([A-Za-z_][\w.]*)(?::\s*(.*))?$",
    re.MULTILINE,
)
_FRAME = re.compile(r'^ +File "([^"<]+)", line (\d+)', re.MULTILINE)
# Where other people's code is.
_PACKAGES = re.compile(r"/site-packages/|/dist-packages/|/lib/python3|/kit/plugins/")
# The last line of a traceback alone, at the beginning of a line.
_EXCEPTION = re.compile(
    r"^()([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)): ?(.*)", re.MULTILINE
)


def read_errors(logs: Path) -> list[dict[str, Any]]:
    """Return what ranks and nodes left in an attempt's log folder, in no order."""
    until = time.monotonic() + WAIT_S
    records = (_record(path, until) for path in logs.glob("error_*.json"))
    errors = [record for record in records if record]
    errors += _of_peers(errors)
    # A workload that starts torchrun itself has its report in the log of its own output.
    for path in (*logs.glob("node_*.log"), *logs.glob("rank_*.log")):
        errors += _killed_ranks(path)
    # A script of the user's own leaves no record: its traceback says what happened.
    return errors or [error for path in logs.glob("rank_*.log") for error in _exception(path)]


def _record(path: Path, until: float) -> dict[str, Any]:
    """Return the record of a fault, {} if it is damaged; until: a monotonic clock, in seconds.

    One that cannot be read is a fault of the storage: that there was none would be another cause.
    """
    try:
        return patiently(files.read_object, path, most_s=until - time.monotonic()) or {}
    except files.DamagedFile:
        return {}
    except OSError as error:
        return fault(f"{path} cannot be read: {error.strerror}", STORAGE, permanent=False)


def first_error(errors: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the error that caused the others, None if there is none.

    A permanent one comes first, then what the watchdog ended, what the memory limit ended, a killed
    rank (the others report a broken connection, often sooner), then the earliest. Broken
    connections come last, and then a rank that only reports another's fault.
    """

    def order(error: dict[str, Any]) -> tuple[bool, int, float]:
        kind = error.get("type")
        place = _ORDER.index(kind if kind in _ORDER else None)
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
    where = f"node {host}: " if host else ""
    where = where if rank is None else f"rank {rank} on {host}: "
    lines = str(error.get("message", "")).splitlines() or ["no message"]
    # The trainer's own records begin with the exception's name.
    kind = f"{error.get('type', 'error')}: "
    return f"{where}{kind}{lines[0].removeprefix(kind)}"


def full_disk(run_dir: Path) -> dict[str, Any] | None:
    """Return the record of a full disk, which names no node, or None if the run's has space."""
    probe = run_dir / f".probe.{os.getpid()}"
    try:
        with probe.open("xb", buffering=0) as file:
            file.write(b"0" * _LAST_BYTES)
    except OSError as error:
        if error.errno not in OF_A_DISK:
            return None
        # An empty new file needs an inode only.
        message = f"no space left on the filesystem of {run_dir}: free some, or raise the quota"
        if not probe.exists():
            message = (
                f"no inodes are left on the filesystem of {run_dir}, so it takes no new file: "
            )
            message += "remove files, or raise the quota of their number"
        return fault(message, "NoSpace", None)
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    return None


def slurm_errors(log: str, logs: Path) -> list[dict[str, Any]]:
    """Return what Slurm reports in the job's log and those of nodes: a lost node, memory, a kill.

    Args:
        log: the job's log since the attempt began.
        logs: the attempt's log folder.
    """
    if lost := job_log.lost_nodes(log):
        return [_of_slurm("Slurm lost this node", NODE_FAILURE, node) for node in lost]
    if memory := _out_of_memory(log, logs):
        return [memory]
    first = job_log.TASK.search(log)
    node, task, end = first.groups() if first else ("", "", "")
    killed = next((name for said, name in _SIGNALS.items() if end.startswith(said)), None)
    if killed is None:
        return []
    nodes = allocation.hosts_of(node)
    by = SIGKILL if killed == "SIGKILL" else f"killed by {killed}"
    message = f"the process that starts this node's ranks (task {task}) was {by}"
    return [_of_slurm(message, "Killed", nodes[0] if len(nodes) == 1 else None)]


def _of_slurm(message: str, kind: str, host: str | None, **more: Any) -> dict[str, Any]:
    """Return the record of what Slurm has reported: of those of a kind it comes first."""
    return fault(message, kind, host, permanent=False, time=0, **more)


def _out_of_memory(log: str, logs: Path) -> dict[str, Any] | None:
    """Return the record of memory that ran out, None if it did not.

    Its node is named in Slurm's line, or is the one whose log has that line.
    """
    reports = {"": job_log.out_of_memory(log)}
    for path in sorted(logs.glob("node_*.log")):
        reports[path.stem.removeprefix("node_")] = job_log.out_of_memory(_tail(path))
    known = [(number, *report) for number, report in reports.items() if report]
    if not known:
        return None
    number, line, node = next((report for report in known if report[2]), known[-1])
    rank = int(number) if number.isdigit() and not node else None
    message = f"{line}: raise resources.mem, or lower what the ranks keep in CPU memory"
    return _of_slurm(message, OUT_OF_MEMORY, node, node_rank=rank)


def on_nodes(
    errors: list[dict[str, Any]], hosts: list[str], ranks_per_node: int
) -> list[dict[str, Any]]:
    """Return the errors with Slurm's name of the node, found by the rank or the node's number.

    Several nodes may be on one host, and a host may have other names. A rank's record may name
    another node, or none, whose fault it is: that of a sampler.
    """

    def named(error: dict[str, Any]) -> dict[str, Any]:
        if "of_node" in error:
            return {**error, "host": error["of_node"], "rank": None}
        rank, number = error.get("rank"), error.get("node_rank")
        number = rank // ranks_per_node if isinstance(rank, int) else number
        if isinstance(number, int) and number < len(hosts):
            return {**error, "host": hosts[number]}
        return error

    return list(map(named, errors))


def _of_peers(errors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what ranks say of others that left no record, as on a disk that is full."""
    known = {error.get("rank") for error in errors}
    peers = {
        peer["rank"]: {**peer, "time": error.get("time", 0)}
        for error in errors
        for peer in error.get("peers") or []
    }
    return [error for rank, error in peers.items() if rank not in known]


def _killed_ranks(node_log: Path) -> list[dict[str, Any]]:
    errors = []
    for when, host, rank, name in _KILLED.findall(_tail(node_log)):
        kind = "Killed"
        message = SIGKILL if name == "SIGKILL" else f"killed by {name}"
        timeout = _NCCL_TIMEOUT.search(_tail(node_log.with_name(f"rank_{rank}.log")))
        if name == "SIGABRT" and timeout:
            kind, message = "NetworkTimeout", timeout.group().strip()
        killed = time.mktime(time.strptime(when, "%Y-%m-%d_%H:%M:%S"))
        errors.append(fault(message, kind, host, permanent=False, rank=int(rank), time=killed))
    return errors


def _exception(rank_log: Path) -> list[dict[str, Any]]:
    """Return the last exception in a rank's log."""
    number = rank_log.stem.removeprefix("rank_")
    error = _last_exception(_PREFIX.sub("", _tail(rank_log)))
    if not error or not number.isdigit():
        return []
    # A rank that lost its peers writes last; the one that failed first wrote before it.
    written = rank_log.stat().st_mtime
    return [{"rank": int(number), "host": socket.gethostname(), "time": written, **error}]


def _last_exception(text: str) -> dict[str, str]:
    """Return type and message of a text's last exception, with the last line of the user's code."""
    exceptions = _TRACEBACK.findall(text) or _EXCEPTION.findall(text)
    if not exceptions:
        return {}
    frames, name, message = exceptions[-1]
    name = name.removeprefix("__main__.")
    places = _FRAME.findall(frames)
    own = [place for place in places if not _PACKAGES.search(place[0])]
    for path, line in (own or places)[-1:]:
        message = f"{message} ({path.rpartition('/')[2]}:{line})".lstrip()
    errno = _ERRNO.match(message)
    if errno and int(errno[1]) in UNREADABLE:
        name = STORAGE
    return {"type": name, "message": message}


def _tail(log: Path) -> str:
    return job_log.since(log, -_TAIL_BYTES)
