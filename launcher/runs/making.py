"""A run directory that is being made: it appears whole, or nothing of it stays."""

import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runspec import files, lock, publish

_HOLDER = re.compile(r"process (\d+) on (.+)\Z")
# Nobody can ask another host whether a command still runs there.
_LEFT_S = 86400


@contextmanager
def half_made(path: Path, named: bool = True) -> Iterator[Path]:
    """Yield a new folder that gets the given path if the block succeeds, and is removed if not.

    What a command left that was killed on this host is removed, too.

    Args:
        named: False leaves it hidden, for a sweep that makes several runs at once.
    """
    remove_left(path.parent)
    temporary = publish.begin(path, alone=True)
    try:
        (temporary / files.LOCK).write_text(lock.holder(), encoding="utf-8")
        yield temporary
        if named:
            publish.finish(temporary, path, "refuse")
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_left(root: Path) -> None:
    """Remove the half-made folders whose command has ended."""
    for path in left(root):
        with suppress(OSError):
            shutil.rmtree(path)


def left(root: Path) -> list[Path]:
    """Return the half-made folders whose command has ended."""
    paths = []
    for path in sorted(root.glob(f"{files.TEMPORARY}*")):
        with suppress(OSError):
            paths += [path] if _is_left(path) else []
    return paths


def _is_left(path: Path) -> bool:
    try:
        sweep = (files.read_object(path / files.SUBMISSION) or {}).get("sweep")
    except files.DamagedFile:
        sweep = None  # it is written whole, so that the disk was full
    if sweep and (path.parent.parent / files.SWEEPS / str(sweep)).is_dir():
        return False  # its sweep gives it its name
    try:
        made_by = _HOLDER.match((path / files.LOCK).read_text(encoding="utf-8"))
    except FileNotFoundError:
        made_by = None
    if made_by and made_by[2] == socket.gethostname():
        try:
            os.kill(int(made_by[1]), 0)
        except ProcessLookupError:
            return True
    return time.time() - path.stat().st_mtime > _LEFT_S
