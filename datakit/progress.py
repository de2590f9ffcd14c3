"""How far a preparation in a job is: the run's progress.json, which decides on a further attempt.

A piece is a written table or a task of an Arrow function. Every attempt meets the same pieces in
the same order, finished ones too, so that their number says whether an attempt came further than
all before it.
"""

import os
import time
from pathlib import Path

from runspec import files

# A large step finishes many tasks a second, and the file lies on a shared disk.
_EVERY_S = 2.0


class Progress:
    """Writes progress.json if this process is part of a run, else nothing.

    total: steps of the recipe, reading and writing included.
    """

    def __init__(self, total: int) -> None:
        folder = os.environ.get("RUN_DIR")
        self._path = Path(folder) / files.PROGRESS if folder else None
        attempt = os.environ.get("ATTEMPT", "")
        self._told = {"attempt": int(attempt) if attempt.isdigit() else 0, "total_steps": total}
        self._step = self._pieces = 0
        before = files.read_json_or_none(self._path) if self._path else None
        self._most = int(before.get("saved", 0)) if isinstance(before, dict) else 0
        self._last = 0.0
        self.write("running")

    def piece(self) -> None:
        """Count a piece that is finished."""
        self._pieces += 1
        if time.monotonic() - self._last > _EVERY_S:
            self.write("running")

    def step(self) -> None:
        """Count a step that is finished."""
        self._step += 1
        self.write("running")

    def write(self, state: str) -> None:
        """Replace the file; state is running or finished."""
        if self._path is None:
            return
        self._last = time.monotonic()
        self._most = max(self._most, self._pieces)
        told = {"state": state, "step": self._step, "saved": self._most, "updated": time.time()}
        files.write_json(self._path, {**self._told, **told})
