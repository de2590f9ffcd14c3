"""A sweep's record: <shared folder>/sweeps/<utc>-<name>-<4 hex>/sweep.json.

It has the recipe, and the settings and the run of each cell.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import RunFault, UnknownRun, nearest
from launcher.run import find as runs
from launcher.run.directory import Run, runs_root
from runspec import files, publish

_NAME = re.compile(r"\d{8}-\d{6}-(?P<label>[A-Za-z0-9][A-Za-z0-9._-]{0,63})-[0-9a-f]{4}\Z")


@dataclass(frozen=True)
class SweepDirectory:
    """A sweep that was started."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def record(self) -> dict[str, Any]:
        """The content of sweep.json.

        Raises:
            RunFault: it cannot be read.
        """
        path = self.path / files.SWEEP
        try:
            value = files.read_json(path)
        except (OSError, ValueError) as error:
            raise RunFault(f"{path} cannot be read: {error}") from error
        if not isinstance(value, dict) or not isinstance(value.get("cells"), list):
            raise RunFault(f"{path} contains no sweep: start a new one with: cookbook sweep NAME")
        return value

    @property
    def cells(self) -> list[dict[str, Any]]:
        """Its cells in order: number, name, overrides and run."""
        return [cell for cell in self.record["cells"] if isinstance(cell, dict)]

    def run_of(self, cell: Mapping[str, Any]) -> Run:
        """Return the run of a cell."""
        return Run(runs_root(self.path.parent.parent) / str(cell["run"]))

    @property
    def runs(self) -> list[Run]:
        """The runs that are still there, in the order of the cells."""
        runs = [self.run_of(cell) for cell in self.cells]
        return [run for run in runs if run.path.is_dir()]


def root(shared: Path) -> Path:
    """Return the folder of all sweeps, in the shared folder."""
    return shared / files.SWEEPS


def create(path: Path, record: Mapping[str, Any]) -> SweepDirectory:
    """Make a sweep's directory whole, or not at all.

    Raises:
        RunFault: it cannot be made.
    """
    try:
        with publish.folder(path, "refuse", alone=True) as temporary:
            temporary.chmod(temporary.stat().st_mode & ~0o027)
            files.write_json(temporary / files.SWEEP, dict(record))
    except OSError as error:
        raise RunFault(
            f"cannot make the sweep's directory {path}: {error.strerror or error}: set "
            "COOKBOOK_ROOT to a folder that you own, with free space, on the shared filesystem"
        ) from error
    return SweepDirectory(path)


def every(shared: Path) -> list[SweepDirectory]:
    """Return all sweeps, oldest first."""
    try:
        names = [entry.name for entry in os.scandir(root(shared)) if _NAME.match(entry.name)]
    except OSError:
        return []
    return [SweepDirectory(root(shared) / name) for name in sorted(names)]


def find(shared: Path, wanted: str) -> SweepDirectory:
    """Return the sweep that wanted names: its name, a unique part of it, or last.

    The name of its file means the newest of that name.
    """
    known = every(shared)
    if sweep := _match(known, wanted):
        return sweep
    if not known:
        raise UnknownRun(
            f"there is no sweep in {root(shared)} yet: start one with: cookbook sweep NAME"
        )
    hint = nearest(wanted, [each.name for each in known])
    names = ", ".join(each.name for each in known[-3:])
    raise UnknownRun(f"no sweep, or more than one, matches {wanted!r}{hint}; the newest: {names}")


def _match(known: Sequence[SweepDirectory], wanted: str) -> SweepDirectory | None:
    if wanted == "last":
        return known[-1] if known else None
    labels = ((each, _NAME.match(each.name)) for each in known)
    named = [each for each, label in labels if label and wanted in (each.name, label["label"])]
    if named:
        return named[-1]
    parts = [each for each in known if wanted and wanted in each.name]
    return parts[0] if len(parts) == 1 else None


def runs_of(shared: Path, wanted: Iterable[str]) -> list[Run]:
    """Return the runs that words name, each a run or a sweep, in order and without repeats.

    A sweep goes before a run if its whole name, or that of its file, is given.
    """
    known, chosen = every(shared), []
    for word in wanted:
        labels = {match["label"] for each in known if (match := _NAME.match(each.name))}
        exact = word in labels or any(word == each.name for each in known)
        sweep = _match(known, word) if exact else None
        if sweep is None:
            try:
                chosen.append(runs.find(runs_root(shared), word))
                continue
            except UnknownRun:
                sweep = None if word == "last" else _match(known, word)
                if sweep is None:
                    raise
        chosen += sweep.runs
    return list(dict.fromkeys(chosen))
