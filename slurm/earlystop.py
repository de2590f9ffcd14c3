"""Stops a run of a sweep that is clearly worse than the others.

The supervisor looks at the metrics of all runs of the sweep; runspec/earlystop.py has the rule. A
run that it stops saves a checkpoint first. Standard library only.
"""

import time
from pathlib import Path
from typing import Any

from runspec import files
from runspec.earlystop import KEYS, verdict
from slurm.history import read_lines


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return the logged steps of a run, [] if there are none."""
    try:
        return read_lines(run_dir / files.METRICS)
    except OSError:
        return []


def stopped_before(run_dir: Path) -> bool:
    """Whether an earlier attempt was stopped early: a run that was resumed since then continues."""
    lines = read_lines(run_dir / files.ATTEMPTS)
    return any(line.get("cause") == "stopped_early" for line in lines)


def look(run_dir: Path, sweep_dir: Path, rule: dict[str, Any]) -> str:
    """Return the reason to stop the run, "" to continue."""
    own = rows(run_dir)
    if not own:
        return ""
    tasks = sorted((sweep_dir / files.TASKS).iterdir())
    others = [rows(task) for task in tasks if task.resolve() != run_dir.resolve()]
    return verdict(own, others, rule)


class EarlyStop:
    """Stops a run of a sweep that has an early_stop rule, once an attempt is clearly worse."""

    def __init__(self, run_dir: Path, sweep_dir: Path) -> None:
        self._run_dir, self._sweep_dir = run_dir, sweep_dir
        rule = files.peek(sweep_dir / files.SWEEP).get("early_stop")
        known = {**KEYS, **rule} if isinstance(rule, dict) else None
        self._rule = None if stopped_before(run_dir) else known
        self._every_s = float(self._rule["every_s"]) if self._rule else 0.0
        self._next = time.monotonic() + self._every_s

    def look(self) -> None:
        """Compare the run with the others if it is time to; OSError: a file cannot be written."""
        if self._rule is None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._every_s
        if reason := look(self._run_dir, self._sweep_dir, self._rule):
            # The reason first: it must be written before the ranks have stopped.
            said = {"message": reason, "time": time.time()}
            files.write_json(self._run_dir / files.EARLY_STOP, said)
            (self._run_dir / files.STOP).touch()
            self._rule = None
