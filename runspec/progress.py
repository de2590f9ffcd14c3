"""How far a program has come: a run's progress.json, and the sign of life of its steps.

Standard library only: a plug-in uses it in the environment of another trainer.
"""

import json
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

from runspec import files

# A step of milliseconds need not reach the filesystem each time.
_WRITE_EVERY_S = 2.0
# Whose duration is not measured: it is no phase that ends and comes again.
_OF_STEPS = ("starting", "training")


def write(run_dir: Path, facts: dict[str, Any]) -> None:
    """Replace the run's progress.json.

    Args:
        facts: state (running, stopped or finished), attempt, step, total_steps, and whatever else
            is known. `saved` counts the work that no later attempt repeats, where the program keeps
            no checkpoints.
    """
    files.write_json(run_dir / files.PROGRESS, {**facts, "updated": time.time()})


class Heartbeat:
    """logs/<attempt>/heartbeat.json: phase, step, median time of a step, longest of other phases.

    slurm/watchdog.py reads it. Rank 0 meets all ranks at each step, so it stops when one does.

    Args:
        logs: the attempt's log folder; nothing is written if there is none.
    """

    def __init__(self, logs: Path | None) -> None:
        self._path = logs / files.HEARTBEAT if logs is not None and logs.is_dir() else None
        self._times: deque[float] = deque(maxlen=101)
        self._longest: dict[str, float] = {}
        self._phase, self._step, self._steps = "starting", 0, 0
        self._began, self._written = time.monotonic(), 0.0
        self._write()

    def step(self, number: int) -> None:
        """A step was done."""
        now = time.monotonic()
        # The first one compiles, and fills caches.
        if self._steps:
            self._times.append(now - self._began)
        # The second one is the first whose time says what a step takes.
        changed = self._phase != "training" or self._steps == 1
        self._phase, self._step, self._steps, self._began = "training", number, self._steps + 1, now
        if changed or now - self._written >= _WRITE_EVERY_S:
            self._write()

    def enter(self, phase: str) -> None:
        """What follows is no step: saving, exporting. The time of the phase before it is known."""
        now = time.monotonic()
        if self._phase not in _OF_STEPS:
            self._longest[self._phase] = max(now - self._began, self._longest.get(self._phase, 0.0))
        self._phase, self._began = phase, now
        self._write()

    def leave(self) -> None:
        """The next step begins; a phase other than training has ended."""
        if self._phase not in _OF_STEPS:
            self.enter("training")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens inside is no step, and is measured for the next time."""
        before = self._phase
        self.enter(name)
        yield
        self.enter(before)

    @property
    def usual_s(self) -> float | None:
        """The median time of a step, None before two are done."""
        return median(self._times) if self._times else None

    def _write(self) -> None:
        if self._path is None:
            return
        self._written = time.monotonic()
        beat = {
            "phase": self._phase,
            "step": self._step,
            "steps": self._steps,
            "median_step_s": self.usual_s,
            "longest_s": self._longest,
        }
        # No rename and no fsync: training waits for this. A full disk ends no run here.
        with suppress(OSError):
            self._path.write_text(json.dumps(beat) + "\n", encoding="utf-8")
