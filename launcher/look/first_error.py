"""Which rank failed first, why, and the last lines of its log."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.run.directory import Run
from runspec import files

# Ends of an attempt that are nobody's error.
_NO_ERROR = {"finished", "time_limit", "preempted", "requeued", "cancelled", None}
_RANK = re.compile(r"rank (\d+) on ")


@dataclass(frozen=True)
class FirstError:
    """The first failure of an attempt: in message, its traceback, the log that shows it."""

    attempt: int
    message: str
    traceback: str
    log: Path


def first_error(run: Run, attempt: int | None = None) -> FirstError | None:
    """Return what failed first in an attempt, by default in the newest one that failed."""
    status, recorded = run.status, run.attempts
    if status.get("attempt") not in [each.get("attempt") for each in recorded]:
        recorded = [*recorded, status]
    for record in reversed(recorded):
        number = record.get("attempt")
        if not isinstance(number, int) or attempt not in (None, number):
            continue
        folder = run.logs / str(number)
        errors = _errors(folder)
        if record.get("cause") in _NO_ERROR and (record.get("ended") or not errors):
            continue
        return _found(run, number, record, errors, folder)
    return None


def _found(
    run: Run, number: int, record: dict[str, Any], errors: list[dict[str, Any]], folder: Path
) -> FirstError:
    text = str(record.get("message") or "")
    named = _RANK.search(text)
    rank = int(named[1]) if named else None
    error = next((each for each in errors if each.get("rank") == rank), None)
    if not text and errors:
        # The attempt has not ended yet: ranks that only lost their peers explain nothing.
        error = min(errors, key=lambda each: (each.get("type") == "PeerError", _time(each)))
        rank = error.get("rank")
        message = str(error.get("message") or error.get("type") or "error").partition("\n")[0]
        text = f"rank {rank} on {error.get('host', '?')}: {message}"
    nodes = record.get("nodes")
    names = nodes if isinstance(nodes, list) else []
    at = names.index(record["node"]) if record.get("node") in names else 0
    # A rank that was killed at once wrote nothing; its node's log holds what all its ranks wrote.
    logs = (folder / f"rank_{rank}.log", folder / f"node_{at}.log")
    log = next((path for path in logs if _has_text(path)), run.path / files.JOB_LOG)
    cause = record.get("cause")
    return FirstError(
        number,
        f"{cause}: {text}" if cause else text,
        str((error or {}).get("traceback") or ""),
        log,
    )


def _has_text(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _errors(folder: Path) -> list[dict[str, Any]]:
    """Return what ranks and nodes recorded in an attempt's log folder."""
    records = map(files.peek, sorted(folder.glob("error_*.json")))
    return [record for record in records if record]


def _time(error: dict[str, Any]) -> float:
    value = error.get("time")
    return float(value) if isinstance(value, int | float) else 0.0
