"""Temporary folders of an engine on a disk of the node, which are always removed.

A folder is removed when its process ends, and the folders of killed processes when the next one
starts. Each process holds a lock on a file in its folder, which the kernel releases at its end.
"""

import atexit
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from plugins.data.errors import DataError
from runspec import lock

KINDS = ("duckdb", "spark", "preview")
_LOCK = ".lock"

_held: dict[Path, TextIO] = {}


def parent_of(temp_dir: object) -> Path:
    """Return the folder to spill to: the recipe's temp_dir, TMPDIR or /tmp.

    Raises:
        DataError: there is no such folder.
    """
    folder = Path(str(temp_dir or os.environ.get("TMPDIR") or "/tmp")).expanduser()
    if not folder.is_dir():
        raise DataError(
            f"temp_dir: there is no folder {folder}: give one on a disk of this node", exit_code=2
        )
    return folder


def make(kind: str, parent: Path) -> Path:
    """Return a new folder parent/cookbook-KIND-..., and remove unused ones.

    In a Slurm job its name has the job's id.

    Raises:
        DataError: the parent cannot be written to.
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    prefix = f"cookbook-{kind}-{f'job{job}-' if job else ''}"
    try:
        sweep(parent)
        hidden = Path(tempfile.mkdtemp(prefix=".", dir=parent))
        held = lock.take(hidden / _LOCK)
        # Others see it once it is locked.
        folder = hidden.rename(parent / f"{prefix}{hidden.name[1:]}")
    except OSError as error:
        raise DataError(
            f"temp_dir {parent} cannot be written to ({error.strerror}): set temp_dir= to a "
            "folder on a disk of this machine with room to spill"
        ) from None
    _held[folder] = held
    atexit.register(remove, folder)
    return folder


def remove(folder: Path) -> None:
    """Remove a folder that this process made."""
    shutil.rmtree(folder, ignore_errors=True)
    if held := _held.pop(folder, None):
        held.close()


def sweep(parent: Path) -> None:
    """Remove this user's folders whose processes have ended."""
    for kind in KINDS:
        for file in parent.glob(f"cookbook-{kind}-*/{_LOCK}"):
            folder = file.parent
            with suppress(OSError, lock.Held):
                if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
                    with lock.take(file):
                        shutil.rmtree(folder, ignore_errors=True)
