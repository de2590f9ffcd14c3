"""A lock file that says who holds it."""

import fcntl
import os
import socket
import time
from typing import TextIO

_LOOK_EVERY_S = 0.2


class Held(Exception):
    """Another process holds the lock; its text says which, as far as that is known."""


def take(file: TextIO, wait_s: float = 0.0) -> None:
    """Lock an open file ("a+") and write into it who has it; it is held until the file is closed.

    The kernel removes the lock when all processes that have the file open have ended, however they
    end.

    Raises:
        Held: another process has it for longer than wait_s.
        OSError: the filesystem has no locks.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                file.seek(0)
                raise Held(file.read() or "unknown") from error
            time.sleep(_LOOK_EVERY_S)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
