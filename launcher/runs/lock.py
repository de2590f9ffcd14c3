"""A lock file that says who holds it."""

import fcntl
import os
import socket
import time
from collections.abc import Callable
from typing import TextIO

_LOOK_EVERY_S = 0.2
# Most commands need less, and whoever waits longer is told why.
_SAY_AFTER_S = 2.0


class Held(Exception):
    """Another process holds the lock; its text says which, as far as that is known."""


def take(
    file: TextIO, wait_s: float = 0.0, waiting: Callable[[str], None] = lambda held_by: None
) -> None:
    """Lock an open file ("a+") and write into it who has it; it is held until the file is closed.

    The kernel removes the lock when all processes that have the file open have ended, however they
    end.

    Args:
        waiting: called once, with who holds the lock, if that takes more than a moment.

    Raises:
        Held: another process has it for longer than wait_s.
        OSError: the filesystem has no locks.
    """
    began, said = time.monotonic(), False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            waited_s = time.monotonic() - began
            file.seek(0)
            held_by = file.read() or "unknown"
            if waited_s >= wait_s:
                raise Held(held_by) from error
            if not said and waited_s >= _SAY_AFTER_S:
                said = True
                waiting(held_by)
            time.sleep(_LOOK_EVERY_S)
    file.truncate(0)
    file.write(holder())
    file.flush()


def holder() -> str:
    """Return what a lock file says while this process holds it."""
    return f"process {os.getpid()} on {socket.gethostname()}"
