"""What the attempts before this one brought and used: the records of a run, read.

slurm/attempt.py writes them. Standard library only.
"""

import os
from pathlib import Path
from typing import Any

from runspec import files
from runspec.storage import patiently
from runspec.usage import gpu_hours
from slurm.identity import own_job_id
from slurm.retry import NOT_COUNTED
from slurm.typed import well_typed

# How long the job script waits for storage that cannot be read.
_WAIT_S = 5.0


def read_object(path: Path) -> dict[str, Any]:
    """Return a file's JSON object, {} if it is missing or broken: the end must be recorded.

    Raises:
        OSError: it cannot be read now, which does not mean that it holds nothing.
    """
    try:
        value = files.read_json(path)
    except ValueError:
        return {}
    return well_typed(value) if isinstance(value, dict) else {}


def next_attempt(run_dir: Path, status: dict[str, Any]) -> int:
    """Return a number that no attempt has had, whatever the records say."""
    lines = files.read_json_lines(run_dir / files.ATTEMPTS)
    had = [line.get("attempt") for line in lines if isinstance(line, dict)]
    # An empty folder is that of a start which could not be recorded, and is tried again.
    folders = [path for path in (run_dir / files.LOGS).glob("[0-9]*") if path.name.isdigit()]
    had += [int(path.name) for path in folders if any(path.iterdir())]
    return 1 + max([-1, int(status.get("attempt", -1)), *(n for n in had if isinstance(n, int))])


def series_of(run_dir: Path) -> str:
    """Return the id of the job that began the series of which this one is the latest.

    A job that took another's place by itself belongs to its series; a resumed run begins a new one.
    """
    status, job_id = read_object(run_dir / files.STATUS), own_job_id()
    if job_id in (str(status.get("job_id")), str(status.get("successor"))):
        return str(status.get("series") or status.get("job_id"))
    return job_id


def attempts_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of the attempts of this job's series: a resumed run begins to count anew."""
    series, lines = series_of(run_dir), files.read_json_lines(run_dir / files.ATTEMPTS)
    return [
        line
        for line in lines
        if isinstance(line, dict) and str(line.get("series") or line.get("job_id")) == series
    ]


def count_fruitless(run_dir: Path) -> int:
    """Return how many attempts since the last gain brought no newer checkpoint."""
    attempts = attempts_of(run_dir)
    gains = [number for number, line in enumerate(attempts) if line.get("gained")]
    since = attempts[gains[-1] + 1 if gains else 0 :]
    return sum(line.get("cause") not in NOT_COUNTED for line in since)


def used_up(run_dir: Path, running: dict[str, Any] | None = None) -> str:
    """Say that the run has used its GPU-hours, "" if it may go on.

    Args:
        running: the attempt that is not in attempts.jsonl yet.
    """
    budget = float(os.environ.get("MAX_GPU_HOURS") or 0)
    lines = files.read_json_lines(run_dir / files.ATTEMPTS)
    used = gpu_hours(line for line in [*lines, running or {}] if isinstance(line, dict))
    if not budget or used < budget:
        return ""
    return (
        f"the run has used {used:.4g} GPU-hours, and max_gpu_hours is {budget:g}: continue with: "
        f"cookbook resume {run_dir.name} max_gpu_hours={2 * budget:g}"
    )


def latest_checkpoint(run_dir: Path) -> int:
    """Return the step of the newest complete checkpoint, -1 for none.

    While the folder cannot be read that is the one that the trainer has reported: the end of an
    attempt must be recorded.
    """
    try:
        steps = patiently(files.checkpoint_steps, run_dir, most_s=_WAIT_S)
    except OSError:
        steps = [int(read_object(run_dir / files.PROGRESS).get("checkpoint_step") or -1)]
    return max(steps, default=-1)


def saved_work(run_dir: Path) -> int:
    """Return a number that grows whenever a run saves work that no later attempt does again.

    That is the step of the newest checkpoint, of an evaluation how many shards are done, what the
    preparation of data counts as saved, or of a served model the minutes for which it was ready:
    one that has served may be started again.
    """
    shards = list((run_dir / files.EVALS / files.SHARDS).glob("*.json"))
    saved = int(read_object(run_dir / files.PROGRESS).get("saved", -1))
    served = int(read_object(run_dir / files.SERVED).get("minutes", 0))
    return max(latest_checkpoint(run_dir), len(shards) or -1, saved, served or -1)


def gained_by(run_dir: Path, status: dict[str, Any]) -> bool:
    """Whether the attempt of this status saved work."""
    return saved_work(run_dir) > int(status.get("saved_at_start", -1))
