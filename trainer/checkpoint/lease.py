"""Which start of a run may write: the newest one.

A node that Slurm has given up may still run its ranks, beside those of the attempt that took their
place. The job script writes each attempt's number into status.json before its ranks start, and no
rank writes there.
"""

import time
from contextlib import suppress
from pathlib import Path

from runspec import files
from trainer.errors import SupersededError

# A step of milliseconds need not ask the filesystem each time.
_LOOK_EVERY_S = 2.0


class Lease:
    """The right of one start of a run to write its checkpoints.

    Args:
        attempt: the number of this start.
    """

    def __init__(self, run_dir: Path, attempt: int) -> None:
        self._records = (run_dir / files.STATUS, run_dir / files.PROGRESS)
        self._attempt, self._looked = attempt, time.monotonic()

    def newest(self) -> int:
        """Return the number of the newest start that the run's records name.

        Raises:
            OSError: they cannot be read.
        """
        numbers = [self._attempt]
        for path in self._records:
            with suppress(ValueError):
                record = files.read_json(path)
                number = record.get("attempt") if isinstance(record, dict) else None
                numbers += [number] if isinstance(number, int) else []
        return max(numbers)

    def lost_here(self) -> bool:
        """Whether a newer start has taken over; looked up every two seconds at most."""
        now = time.monotonic()
        if now - self._looked < _LOOK_EVERY_S:
            return False
        self._looked = now
        try:
            return self.newest() > self._attempt
        except OSError:
            return False

    def superseded(self, newest: int | None = None) -> SupersededError:
        """Return the fault of a start that goes on after a newer one has begun."""
        by = "a newer one" if newest is None else f"start {newest}"
        return SupersededError(
            f"this is start {self._attempt} of the run and {by} has taken over: this one stops, "
            "and writes no checkpoint"
        )
