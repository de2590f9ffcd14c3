"""What can be removed without losing anything: what can be computed again, and what was left."""

import os
import re
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launcher import paths
from launcher.run import built, code, trust
from launcher.run.directory import Run, runs_root
from launcher.run.find import every
from launcher.run.states import State, judged
from runspec import files

# A run that is being submitted may not link to its code yet.
_YOUNG_S = 86400
# Tokenised data that no run has read for so long can go.
_UNUSED_S = 7 * 86400
# A run replaces files in its directory at each step. One that has not for so long may still wait
# for its nodes; then its data is tokenised again.
OTHERS_S = 30 * 86400
_TREE = re.compile(r"/sent-\d+/trees/([0-9a-f]{64})\b")
# Of checkpoints that training has put aside.
_ASIDE = ("damaged_step_*", "copy_step_*")


@dataclass(frozen=True)
class Item:
    """A file or folder that can go: why, where, and its size in bytes."""

    reason: str
    path: Path
    size: int


def alive(root: Path) -> set[str]:
    """Return the runs under a shared folder that wait or run, or of which nobody can tell.

    A colleague's of which nobody can tell, such as a private one, counts as ended if its directory
    has not changed for OTHERS_S: this user could not end it.
    """
    return {run.name for run, state in judged(every(runs_root(root))) if _may_live(run, state)}


def _may_live(run: Run, state: State) -> bool:
    # A run of a sweep that has no job yet will get one.
    if state.ended and state.word != "PENDING" and _is_readable(run):
        return False
    if state.source == "squeue" or not trust.is_anothers(run.path):
        return True
    try:
        return time.time() - run.path.stat().st_mtime < OTHERS_S
    except OSError:
        return True


def _is_readable(run: Run) -> bool:
    try:
        files.read_json(run.path / files.STATUS)
        code.of_run(run.path)
    except files.DamagedFile:
        pass
    except OSError:
        return False
    return True


def find(root: Path, living: Collection[str]) -> list[Item]:
    """Return what can be removed under a shared folder.

    Args:
        living: the runs that wait or run, whose files stay. Neither the time of a file nor any
            record says which tokenised data they are about to read: all of it stays.
    """
    runs = runs_root(root)
    items: list[tuple[str, Path]] = []
    items += [
        ("tokenised data, made again when needed", path)
        for path in _inside(runs / files.DATA_CACHE)
        if not living and _untouched(path, _UNUSED_S)
    ]
    # What a run that cannot be read names is not known: then nothing is unused. A colleague's
    # private run has code and trees of its own.
    readable = [run for run in every(runs) if _is_readable(run)]
    all_known = all(trust.is_anothers(run.path) for run in set(every(runs)) - set(readable))
    used = {copy.folder for run in readable if (copy := code.of_run(run.path))}
    items += [
        ("code that no run uses", path)
        for path in _inside(root / code.FOLDER / str(os.geteuid()))
        if all_known and path.resolve() not in used and _untouched(path, _YOUNG_S)
    ]
    items += [
        ("an environment that no run uses, built again when needed", each.path)
        for each in built.listed(root)
        if all_known and not each.runs and time.time() - each.used > _YOUNG_S
    ]
    sent = paths.sent(root)
    named = {tree for run in readable for tree in _trees_of(run.path)}
    items += [
        ("sent by a laptop, and no run names it", path)
        for path in _inside(sent / "trees")
        if all_known and path.name not in named and _untouched(path, _YOUNG_S)
    ]
    items += [("left by a killed command", path) for path in _left(runs)]
    items += [
        ("put aside by training, not used", path)
        for run in every(runs)
        if run.name not in living
        for pattern in _ASIDE
        for path in sorted((run.path / files.CHECKPOINTS).glob(pattern))
    ]
    return [Item(reason, path, _size(path)) for reason, path in items]


def _left(runs: Path) -> Iterator[Path]:
    """Yield the half-made runs that nobody makes any more."""
    for path in sorted(runs.glob(f"{files.TEMPORARY}*")):
        with suppress(OSError):  # a colleague's
            if _is_left(path):
                yield path


def _is_left(path: Path) -> bool:
    """Whether a half-made run is nobody's: no sweep gives it its name, and no command makes it."""
    try:
        sweep = (files.read_object(path / files.SUBMISSION) or {}).get("sweep")
    except files.DamagedFile:
        sweep = None  # it is written whole, so that the disk was full
    if sweep and (path.parent.parent / files.SWEEPS / str(sweep)).is_dir():
        return False
    return _untouched(path, _YOUNG_S)


def _trees_of(run: Path) -> Iterator[str]:
    """Yield the trees that a laptop sent and that a run's files name, such as for its data."""
    for name in (files.RECIPE, files.TRAIN, files.SUBMISSION):
        with suppress(FileNotFoundError):
            yield from _TREE.findall((run / name).read_text(encoding="utf-8", errors="replace"))


def remove(items: list[Item]) -> list[Item]:
    """Remove them; return those that could not be removed."""
    kept = []
    for item in items:
        try:
            if item.path.is_dir() and not item.path.is_symlink():
                shutil.rmtree(item.path)
            else:
                item.path.unlink(missing_ok=True)
        except OSError:
            kept.append(item)
    return kept


def _inside(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _files(path: Path) -> Iterator[Path]:
    return (each for each in ([path] if path.is_file() else path.rglob("*")) if each.is_file())


def _untouched(path: Path, seconds: float) -> bool:
    # To list a folder changes its own time of access.
    times = [path.stat().st_mtime]
    for each in _files(path):
        stat = each.stat()
        times.append(max(stat.st_mtime, stat.st_atime))
    return time.time() - max(times) > seconds


def _size(path: Path) -> int:
    total = 0
    for each in _files(path):
        with suppress(OSError):
            total += each.stat().st_blocks * 512
    return total
