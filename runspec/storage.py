"""Storage that cannot be read for a moment: which errors say so, and reading it again."""

import errno
import math
import os
import sys
import time
from collections.abc import Callable, Container
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
# Nor with these: a library's own OSError about the content has no number.
_LASTING = frozenset({None, errno.ENOSPC, errno.EDQUOT, errno.EROFS})


def wait_s() -> float:
    """Return for how long a file that cannot be read is read again, in seconds.

    A job has queued for its nodes; a person in front of a command can type it again.
    """
    return float(os.environ.get("STORAGE_WAIT_S") or (120 if "RUN_DIR" in os.environ else 5))


def is_of_storage(error: BaseException | None) -> bool:
    """Whether an error comes of storage that cannot be read.

    A file that is not there is the user's to fix; one that cannot be read now is not.
    """
    return number_of(error, UNREADABLE) is not None


def number_of(error: BaseException | None, among: Container[int]) -> int | None:
    """Return the one among these numbers that an error comes of, whatever was made of that."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in among:
            return error.errno
        error = error.__cause__ or error.__context__
    return None


def patiently(read: Callable[[Path], T], path: Path, most_s: float = math.inf) -> T:
    """Return read(path), tried again for wait_s() while the storage cannot be read.

    Args:
        most_s: for so long at most.

    Raises:
        FileNotFoundError, NotADirectoryError, IsADirectoryError: at once.
        OSError: it could not be read in all that time.
        Exception: that of read; after all that time if it comes of such storage.
    """
    limit_s, began, pause_s = min(wait_s(), most_s), time.monotonic(), 0.25
    while True:
        try:
            return read(path)
        except ABSENT:
            raise
        except Exception as error:
            lasting = not isinstance(error, OSError) or error.errno in _LASTING
            if lasting and not is_of_storage(error):
                raise
            left_s = began + limit_s - time.monotonic()
            if left_s <= 0:
                raise
            if pause_s < 0.5:
                reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
                print(
                    f"{path} cannot be read ({reason}): trying again for {limit_s:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, 5.0)
