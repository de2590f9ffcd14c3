"""Reads from a run's records what its earlier attempts saved.

slurm/records.py writes them.
"""

from itertools import takewhile
from pathlib import Path
from typing import Any

from runspec import files
from runspec.storage import patiently
from slurm.allocation import own_job_id
from slurm.faults import WAIT_S
from slurm.retry import NOT_COUNTED


def read_object(path: Path) -> dict[str, Any]:
    """Return a file's JSON object, {} if it is missing or broken: the end must be recorded.

    Raises:
        OSError: it cannot be read now, and may have content.
    """
    try:
        return files.read_object(path) or {}
    except files.DamagedFile:
        return {}


def read_progress(run_dir: Path) -> dict[str, Any]:
    """Return progress.json, which a user's own program may write.

    Counts of another type are left out: they must not end the run.
    """
    counts = ("attempt", "saved", "checkpoint_step")
    progress = read_object(run_dir / files.PROGRESS)
    return {
        key: value for key, value in progress.items() if key not in counts or type(value) is int
    }


def next_attempt(run_dir: Path, status: dict[str, Any]) -> int:
    """Return a number that no attempt has had, even if records are missing."""
    used = [line.get("attempt") for line in files.read_json_lines(run_dir / files.ATTEMPTS)]
    # The log folder of a start that could not be recorded is empty: its number is used again.
    folders = [path for path in (run_dir / files.LOGS).glob("[0-9]*") if path.name.isdigit()]
    used += [int(path.name) for path in folders if any(path.iterdir())]
    return 1 + max([-1, int(status.get("attempt", -1)), *(n for n in used if isinstance(n, int))])


def attempts_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the attempts of this job: the count starts again in a resumed run."""
    lines = files.read_json_lines(run_dir / files.ATTEMPTS)
    return [line for line in lines if str(line.get("job_id")) == own_job_id()]


def count_fruitless(run_dir: Path) -> int:
    """Return the number of attempts after the last one that saved a newer checkpoint."""
    since = takewhile(lambda line: not line.get("gained"), reversed(attempts_of(run_dir)))
    return sum(line.get("cause") not in NOT_COUNTED for line in since)


def latest_checkpoint(run_dir: Path) -> int:
    """Return the step of the newest complete checkpoint, -1 for none.

    If the folder cannot be read, it is the one that the trainer has reported: the end of an attempt
    must be recorded.
    """
    try:
        steps = patiently(files.checkpoint_steps, run_dir, most_s=WAIT_S)
    except (OSError, files.DamagedFile):
        steps = [read_progress(run_dir).get("checkpoint_step") or -1]
    return max(steps, default=-1)


def saved_work(run_dir: Path) -> int:
    """Return a number that grows whenever a run saves work that no later attempt repeats.

    It is the step of the newest checkpoint, for an evaluation the number of finished shards, for a
    preparation of data its own count, and for a served model the minutes for which it was ready: a
    model that has served may be restarted.
    """
    shards = list((run_dir / files.EVALS / files.SHARDS).glob("*.json"))
    saved = int(read_progress(run_dir).get("saved", -1))
    served = int(read_object(run_dir / files.SERVED).get("minutes", 0))
    return max(latest_checkpoint(run_dir), len(shards) or -1, saved, served or -1)


def gained_by(run_dir: Path, status: dict[str, Any]) -> bool:
    """Whether the attempt of this status saved work."""
    return saved_work(run_dir) > int(status.get("saved_at_start", -1))
