"""Storage that cannot be read for a moment: which errors say so, and reading it again."""

import errno
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

# A server that restarts, a handle from before that, a mount that is gone: the content may be sound.
UNREADABLE = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.EREMOTEIO,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.EHOSTDOWN,
        errno.ENODEV,
    }
)
# A full disk and a used-up quota, with the type of a fault's record.
OF_A_DISK = {errno.ENOSPC: "NoSpace", errno.EDQUOT: "Quota"}
# The file itself is missing, or is something else: reading it again does not help.
ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


def wait_s() -> float:
    """Return for how long a file that cannot be read is read again, in seconds."""
    return float(os.environ.get("STORAGE_WAIT_S") or 120)


def patiently(read: Callable[[Path], T], path: Path, most_s: float = math.inf) -> T:
    """Return read(path), tried again for wait_s() while the storage cannot be read.

    Args:
        most_s: for so long at most.

    Raises:
        FileNotFoundError, NotADirectoryError, IsADirectoryError: at once.
        OSError: it could not be read in all that time.
    """
    limit_s, began, pause_s = min(wait_s(), most_s), time.monotonic(), 0.25
    while True:
        try:
            return read(path)
        except ABSENT:
            raise
        except OSError as error:
            left_s = began + limit_s - time.monotonic()
            if left_s <= 0:
                raise
            if pause_s < 0.5:
                print(
                    f"{path} cannot be read ({error.strerror}): trying again for {limit_s:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, 5.0)
