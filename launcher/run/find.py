"""Finding runs by what a user types: a name, a unique part of it, a job id, or last."""

import os
import re
from pathlib import Path

from launcher.errors import UnknownRun, nearest
from launcher.run.directory import Run

_RUN_NAME = re.compile(r"\d{8}-\d{6}-[A-Za-z0-9][A-Za-z0-9._-]{0,63}-[0-9a-f]{4}\Z")


def every(root: Path) -> list[Run]:
    """Return all runs, oldest first."""
    try:
        with os.scandir(root) as entries:
            names = [entry.name for entry in entries if _is_run(entry)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [Run(root / name) for name in sorted(names)]


def _is_run(entry: os.DirEntry[str]) -> bool:
    return bool(_RUN_NAME.match(entry.name)) and entry.is_dir()


def none_yet(root: Path) -> str:
    """Return the message for a folder without runs."""
    return f"there is no run in {root} yet: start one with: cookbook submit --recipe demo"


def find(root: Path, wanted: str) -> Run:
    """Return the run that wanted names: its name, a unique part of it, a job id, or 'last'."""
    if _RUN_NAME.match(wanted) and (root / wanted).is_dir():
        # Without a look at all others, of which there may be thousands.
        return Run(root / wanted)
    known = every(root)
    if wanted == "last":
        if not known:
            raise UnknownRun(none_yet(root))
        return known[-1]
    by_job = [run for run in known if wanted.isdigit() and wanted in _job_ids(run)]
    parts = [run for run in known if wanted and wanted in run.name]
    for matching in (by_job, parts):
        if len(matching) == 1:
            return matching[0]
        if matching:
            raise UnknownRun(
                f"{len(matching)} runs match {wanted!r}, such as {matching[-1].name} and "
                f"{matching[-2].name}: give more of the name"
            )
    hint = nearest(wanted, [run.name for run in known])
    raise UnknownRun(f"no run in {root} matches {wanted!r}{hint}: list them with: cookbook status")


def _job_ids(run: Run) -> set[str]:
    """Return the ids of all jobs that a run has had."""
    return {str(record.get("job_id")) for record in (*run.jobs, run.status)}
