"""Ties a podman container to the process that starts it, on both sides of the container.

python -P -m slurm.tether outside podman run ... python -P -m slurm.tether inside COMMAND ...

podman's container is no child of `podman run`: it goes on if that is killed, as by scancel, and a
signal is passed on by another program that the same scancel may end first. The container shares the
host's process ids. So the outer process passes signals on by itself and lasts as long as the
container; the inner one ends all that it started when the outer one is gone. Standard library only.
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from runspec.states import process_start

# For the inner process: the outer one, and the file that gets the inner one's process id.
_VARIABLE = "COOKBOOK_TETHER"
_POLL_S, _END_S = 0.2, 10.0
_PR_SET_CHILD_SUBREAPER = 36
_PASSED_ON = (signal.SIGTERM, signal.SIGINT)


def descendants(pid: int) -> list[int]:
    """Return the processes below one."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    pids = [pid]
    for each in pids:
        pids += children.get(each, [])
    return pids[1:]


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _inner(file: Path) -> list[int]:
    """Return the inner process, if it has said which it is and still runs."""
    with suppress(OSError, ValueError):
        pid, start = file.read_text().split()
        return [int(pid)] if process_start(int(pid)) == start else []
    return []


def outside(command: list[str]) -> int:
    """Run podman, and return its exit status when the container has ended, too."""
    handle, name = tempfile.mkstemp(prefix="tether-", dir=os.environ.get("RANK_SOCKETS"))
    os.close(handle)
    file = Path(name)
    for number in _PASSED_ON:
        signal.signal(number, lambda got, frame: _signal(_inner(file), got))
    variable = {_VARIABLE: f"{os.getpid()} {file}"}
    try:
        code = subprocess.Popen(command, env={**os.environ, **variable}).wait()
        while _inner(file):
            time.sleep(_POLL_S)
    except FileNotFoundError:
        print(f"{command[0]}: command not found", file=sys.stderr)
        return 127
    finally:
        file.unlink(missing_ok=True)
    return 128 - code if code < 0 else code


def inside(command: list[str]) -> int:
    """Run a command until it ends or the outer process is gone."""
    outer, _, file = os.environ[_VARIABLE].partition(" ")
    watched, began = int(outer), process_start(int(outer))
    # A check's container does not see the file.
    with suppress(OSError):
        Path(file).write_text(f"{os.getpid()} {process_start(os.getpid())}")
    # Orphans below come to this process, so that none of them is missed.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child, asked = subprocess.Popen(command), [0.0]

    def end(number: int, frame: object = None) -> None:
        # All of them, as scancel does: torchrun alone would not end its ranks while it waits for
        # the other nodes.
        asked[0] = asked[0] or time.monotonic()
        _signal(descendants(os.getpid()), number)

    for number in _PASSED_ON:
        signal.signal(number, end)
    while child.poll() is None:
        if asked[0] and time.monotonic() - asked[0] > _END_S:
            break
        if began is None or process_start(watched) != began:
            if asked[0]:
                break
            end(signal.SIGTERM)
        time.sleep(_POLL_S)
    _signal(descendants(os.getpid()), signal.SIGKILL)
    code = child.wait()
    with suppress(ChildProcessError):
        while True:
            os.wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit((outside if sys.argv[1] == "outside" else inside)(sys.argv[2:]))
