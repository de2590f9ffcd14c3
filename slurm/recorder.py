"""Writes a run's records from inside its job, again while the filesystem refuses them.

Standard library only.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from slurm import records
from slurm.job_log import say

T = TypeVar("T")

# Slurm sends KILL after KillWait, 30 s by default: so long the last records may take.
LAST_WAIT_S = 15.0


class NotRecorded(Exception):
    """The run's records could not be written for a long time."""


class Recorder:
    """The records of a run, and how long they may take."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self._wait_s = run_dir, seconds("RECORD_WAIT_S", 600)

    def __call__(self, write: Callable[..., T], *given: Any, **named: Any) -> T:
        """Return write(run_dir, ...), called again while a file cannot be read or written.

        A filesystem that is missing or read-only for a minute must not end the run.

        Raises:
            NotRecorded: it failed for all that time.
        """
        began, pause_s = time.monotonic(), 1.0
        while True:
            try:
                return write(self.run_dir, *given, **named)
            except OSError as error:
                reason = f"the run's records were not written ({error})"
                if time.monotonic() - began >= self._wait_s:
                    raise NotRecorded(reason) from error
                say(f"{reason}: tried again for up to {self._wait_s:.0f} s")
                time.sleep(min(pause_s, self._wait_s))
                pause_s = min(2 * pause_s, 30)

    def hurry(self) -> None:
        """Let records take a few seconds from now on: Slurm is ending the job."""
        self._wait_s = min(self._wait_s, LAST_WAIT_S)

    def fail(self, message: str) -> records.Follows:
        """Record that the run failed between two attempts; return what to raise."""
        self(records.between, message, state="FAILED")
        return records.Follows("failed")

    def waiting(self, message: str) -> None:
        """Show what the job waits for between two attempts."""
        with suppress(OSError):
            records.between(self.run_dir, message)


def seconds(name: str, default: float) -> float:
    """Return a variable that holds seconds."""
    return float(os.environ.get(name) or default)
