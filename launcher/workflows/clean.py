"""What can be removed without losing anything: what can be computed again, and what was left."""

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launcher import paths
from launcher.runs import code, image, making
from launcher.runs.directory import runs_root
from launcher.runs.find import every
from runspec import files

# A run that is being submitted may not link to its code yet.
_YOUNG_S = 86400
_TREE = re.compile(r"/sent-\d+/trees/([0-9a-f]{64})\b")
# Of checkpoints that training has put aside.
_ASIDE = ("damaged_step_*", "copy_step_*")


@dataclass(frozen=True)
class Item:
    """A file or folder that can go: why, where, and its size in bytes."""

    reason: str
    path: Path
    size: int


def find(root: Path, older_s: float) -> list[Item]:
    """Return what can be removed under a shared folder, and from this user's cache.

    Args:
        older_s: tokenised data are listed if no run has read or written them for so long.
    """
    runs = runs_root(root)
    items: list[tuple[str, Path]] = []
    items += [("made again when needed", path) for path in _inside(paths.user_cache())]
    items += [
        ("tokenised data, made again when needed", path)
        for path in _inside(runs / files.DATA_CACHE)
        if _untouched(path, older_s)
    ]
    used = {copy.folder for run in every(runs) if (copy := code.of_run(run.path))}
    items += [
        ("code that no run uses", path)
        for path in _inside(root / code.FOLDER)
        if path.resolve() not in used and _untouched(path, _YOUNG_S)
    ]
    sent = paths.sent(root)
    named = {tree for run in every(runs) for tree in _trees_of(run.path)}
    items += [
        ("sent by a laptop, and no run names it", path)
        for path in _inside(sent / "trees")
        if path.name not in named and not path.is_symlink() and _untouched(path, _YOUNG_S)
    ]
    items += [
        ("image, made again when needed", path)
        for path in _inside(root / image.FOLDER)
        if path.suffix == image.SUFFIX and _untouched(path, older_s)
    ]
    items += [("left by a killed command", path) for path in making.left(runs)]
    items += [
        ("put aside by training, not used", path)
        for run in every(runs)
        for pattern in _ASIDE
        for path in sorted((run.path / files.CHECKPOINTS).glob(pattern))
    ]
    return [Item(reason, path, _size(path)) for reason, path in items]


def _trees_of(run: Path) -> Iterator[str]:
    """Yield the trees that a laptop sent and that a run's files name, such as for its data."""
    for name in (files.RECIPE, files.TRAIN, files.SUBMISSION):
        with suppress(OSError):
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
