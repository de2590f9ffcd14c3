"""The progress of a preparation: printed lines, and in a job the run's progress.json.

A piece is a written table or a task of an Arrow function. Every attempt counts the same pieces in
the same order, including finished ones, so that their number shows whether an attempt got further
than all before it. A part is one query, or one Arrow function on all shards.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runspec import files, progress
from runspec.files import patient_json

# A large step finishes many tasks per second, and the file is on a shared disk.
_EVERY_S = 2.0
# Shorter parts print nothing.
_PRINT_EVERY_S = 15.0


class Progress:
    """Prints the progress of a part, and writes progress.json if this process belongs to a run.

    total: number of the recipe's steps, including reading and writing; 0 writes nothing.
    """

    def __init__(self, total: int = 0, say: Callable[[str], None] = lambda text: None) -> None:
        folder = os.environ.get("RUN_DIR") if total else None
        self._run_dir = Path(folder) if folder else None
        attempt = os.environ.get("COOKBOOK_ATTEMPT", "")
        self._fixed = {"attempt": int(attempt) if attempt.isdigit() else 0, "total_steps": total}
        self._say, self._name, self._rows = say, "", 0
        self._step = self._pieces = 0
        self._part: dict[str, Any] | None = None
        before = patient_json(self._run_dir / files.PROGRESS) if self._run_dir else None
        self._most = int((before or {}).get("saved", 0))
        self._last = 0.0
        self._lock = threading.Lock()
        self.write("running")

    def begin(self, name: str, rows: int = 0) -> None:
        """Begin a step; rows: the number of its input rows."""
        self._name, self._rows = name, rows

    @contextmanager
    def part(
        self,
        name: str,
        share: Callable[[], float | None],
        rows: int | None = None,
        first: float = 0.0,
    ) -> Iterator[None]:
        """Show the progress of a part of the step while it runs.

        Args:
            share: returns the finished share, 0 to 1, None if it is unknown.
            rows: number of the part's rows; by default that of the step.
            first: the share of an earlier attempt, which does not count for the rate.
        """
        of = self._rows if rows is None else rows
        began, ended = time.monotonic(), threading.Event()

        def look() -> None:
            reported = began
            while not ended.wait(min(_EVERY_S, _PRINT_EVERY_S)):
                done = share()
                if done is None or ended.is_set():
                    continue
                now = time.monotonic()
                self._part = _figures(f"{self._name} {name}", of, done, first, now - began)
                self.write("running")
                if now - reported >= _PRINT_EVERY_S:
                    reported = now
                    self._say(_line(self._part))

        watching = threading.Thread(target=look, daemon=True)
        watching.start()
        try:
            yield
        finally:
            ended.set()
            watching.join()
            self._part = None

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
        if self._run_dir is None:
            return
        with self._lock:
            self._last = time.monotonic()
            self._most = max(self._most, self._pieces)
            now = {"state": state, "step": self._step, "saved": self._most}
            progress.write(self._run_dir, {**self._fixed, **now, "part": self._part})


def _figures(name: str, of: int, share: float, first: float, seconds: float) -> dict[str, Any]:
    new = max(share - first, 0.0)
    rate = new / seconds if seconds > 0 else 0.0
    return {
        "name": name,
        "rows": round(of * share),
        "of": of,
        "rows_per_second": round(of * rate, 1),
        "left_s": round((1 - share) / rate, 1) if rate else None,
    }


def _line(part: dict[str, Any]) -> str:
    text = f"{part['name']}: {part['rows']:,} of {part['of']:,} rows"
    if part["left_s"] is None:
        return text
    left = int(part["left_s"])
    shown = f"{left // 60} min {left % 60} s" if left < 3600 else f"{left / 3600:.1f} h"
    return f"{text}, {part['rows_per_second']:,.0f} rows/s, about {shown} left"
