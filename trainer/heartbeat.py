"""The sign of life that rank 0 gives, so that the job script notices a run that hangs."""

import json
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from runspec import files

# A step of milliseconds need not reach the filesystem each time.
_WRITE_EVERY_S = 2.0


class Heartbeat:
    """logs/<attempt>/heartbeat.json: phase, step, median time of a step, longest of other phases.

    slurm/watchdog.py reads it. Rank 0 meets all ranks at each step, so it stops when one does.

    Args:
        folder: the attempt's log folder; nothing is written if there is none.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / files.HEARTBEAT if folder is not None and folder.is_dir() else None
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

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens inside is no step, and is measured for the next time."""
        before, self._phase = self._phase, name
        began = time.monotonic()
        self._write()
        yield
        self._phase, self._began = before, time.monotonic()
        self._longest[name] = max(self._began - began, self._longest.get(name, 0.0))
        self._write()

    def leave(self, name: str) -> None:
        """No step follows any more."""
        self._phase = name
        self._write()

    @property
    def usual_s(self) -> float | None:
        """The median time of a step, None before two are done."""
        return float(np.median(self._times)) if self._times else None

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
