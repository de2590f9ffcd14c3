"""Publishing a folder or a link: it appears under its name whole, or not at all.

A folder is written under a temporary name beside its own and renamed. Files: runspec/files.py.
"""

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from runspec import files

# What becomes of a folder that has the name already: it is replaced; it stays, since it holds the
# same; or it is an error.
Existing = Literal["replace", "keep", "refuse"]
# A process on another host may still write what is younger.
_LEFT_S = 86400.0
_UNIQUE = re.compile(r"\.[0-9a-f]{8}\Z")


@contextmanager
def folder(
    path: Path, existing: Existing, *, alone: bool = False, flush: bool = False
) -> Iterator[Path]:
    """Yield a new folder that gets the name `path` if the block succeeds, and is removed if not.

    Args:
        existing, flush: as of finish.
        alone: as of begin.
    """
    temporary = begin(path, alone)
    try:
        yield temporary
        finish(temporary, path, existing, flush)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def hidden(path: Path) -> Path:
    """Return the name that a folder has while its only writer fills it."""
    return path.with_name(f"{files.TEMPORARY}{path.name}")


def begin(path: Path, alone: bool = False) -> Path:
    """Make a new folder beside `path`, and remove what killed processes left there.

    Args:
        alone: no other process writes `path`, so that its folder is `hidden(path)`, and what was
            left of it goes at once. Otherwise the name is unique.
    """
    temporary = hidden(path) if alone else files.beside(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_left(path.parent)
    if alone:
        _remove(temporary)
    temporary.mkdir()
    return temporary


def remove_left(place: Path) -> None:
    """Remove the unfinished files and folders with unique names in a folder that are a day old."""
    for left in place.glob(f"{files.TEMPORARY}*"):
        # Another process may remove it at the same time.
        with suppress(OSError):
            if _UNIQUE.search(left.name) and time.time() - left.stat().st_mtime > _LEFT_S:
                _remove(left)


def finish(temporary: Path, path: Path, existing: Existing, flush: bool = False) -> None:
    """Give a written folder its name.

    Args:
        existing: what becomes of a folder that has the name: "replace" removes it, "keep" removes
            the new one, "refuse" raises OSError.
        flush: all its files reach the disk first, and then its name: for what a crash of the
            machine must not damage.
    """
    if flush:
        for each in [*temporary.rglob("*"), temporary]:
            if not each.is_symlink():
                files.fsync_path(each)
    aside = files.beside(path)
    if existing == "replace":
        with suppress(FileNotFoundError):
            os.rename(path, aside)
    try:
        os.rename(temporary, path)
    except OSError:
        if existing != "keep" or not path.is_dir():
            raise
        shutil.rmtree(temporary, ignore_errors=True)
    if flush:
        files.fsync_path(path.parent)
    _remove(aside)


def link(path: Path, target: str | Path) -> None:
    """Let a symbolic link lead to a target, whether it is there or not."""
    temporary = files.beside(path)
    temporary.symlink_to(target)
    os.replace(temporary, path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
