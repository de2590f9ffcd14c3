"""A lock file that says who holds it."""

import fcntl
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, TextIO

_LOOK_EVERY_S = 0.2
# Most commands need less, and whoever waits longer sees why.
_SAY_AFTER_S = 2.0


class Held(Exception):
    """Another process holds the lock; its text says which, as far as that is known."""


def take(
    path: Path, wait_s: float = 0.0, waiting: Callable[[str], None] = lambda held_by: None
) -> TextIO:
    """Lock a file, made if it is not there, and write into it who has it.

    Returns the open file: the lock is held until it is closed. The kernel removes the lock when all
    processes that have the file open have ended, however they end.

    Args:
        waiting: called once, with who holds the lock, if that takes more than a moment.

    Raises:
        Held: another process has it for longer than wait_s.
        OSError: the file cannot be written, or its filesystem has no locks (flock).
    """
    file = open(path, "a+", encoding="utf-8")  # noqa: SIM115
    began, said = time.monotonic(), False
    try:
        while not try_open(file):
            waited_s = time.monotonic() - began
            file.seek(0)
            held_by = file.read() or "unknown"
            if waited_s >= wait_s:
                raise Held(held_by)
            if not said and waited_s >= _SAY_AFTER_S:
                said = True
                waiting(held_by)
            time.sleep(_LOOK_EVERY_S)
        file.truncate(0)
        file.write(holder())
        file.flush()
    except BaseException:
        file.close()
        raise
    return file


def try_open(file: IO[bytes] | IO[str] | int) -> bool:
    """Lock an open file or descriptor that has another content; False if it is locked.

    Raises:
        OSError: its filesystem has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def holder() -> str:
    """Return what a lock file says while this process holds it."""
    return f"process {os.getpid()} on {socket.gethostname()}"
