"""Why an attempt failed, and the log that shows it."""

import re
from pathlib import Path

from launcher.run.directory import Run
from runspec import files

# Ends of an attempt that are nobody's error.
_NO_ERROR = {"finished", "time_limit", "preempted", "requeued", "cancelled", None}
_RANK = re.compile(r"rank (\d+) on ")


def first_error(run: Run, attempt: int | None = None) -> tuple[str, Path] | None:
    """Return how an attempt failed, by default the newest that did, and the log that shows it.

    Its job has recorded which rank failed first, and which only lost their peers: slurm/faults.py.
    """
    for record in reversed([*run.attempts, run.status]):
        number, cause = record.get("attempt"), record.get("cause")
        if not isinstance(number, int) or cause in _NO_ERROR or attempt not in (None, number):
            continue
        message, nodes = str(record.get("message") or ""), record.get("nodes")
        names = nodes if isinstance(nodes, list) else []
        at = names.index(record["node"]) if record.get("node") in names else 0
        # A rank that was killed at once wrote nothing; its node's log has what all its ranks wrote.
        logs = [run.logs / str(number) / f"node_{at}.log"]
        if named := _RANK.search(message):
            logs.insert(0, run.logs / str(number) / f"rank_{named[1]}.log")
        log = next((path for path in logs if _has_text(path)), run.path / files.JOB_LOG)
        return f"attempt {number} of {run.name} failed: {cause}: {message}", log
    return None


def _has_text(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0
