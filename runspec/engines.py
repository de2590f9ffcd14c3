"""Where another trainer keeps its progress, as data: engine.json in the run directory.

The launcher writes it from the row of the entry table, so that a run holds all that is needed to
follow it. The entry's companion reads the engine's files by it. Standard library only.
"""

import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Records:
    """The files and the end of one engine."""

    name: str
    # The name of a checkpoint's folder in RUN_DIR/checkpoints: a pattern whose group is the step.
    checkpoint: str = ""
    # A file, or a pattern of glob, that a complete checkpoint holds.
    complete: str = "*"
    # A file that it does not hold.
    incomplete: str = ""
    # The file of metrics in RUN_DIR, a pattern of glob; "" if its process writes progress.json.
    metrics: str = ""
    # json (a line each), csv, or log (the pattern `line` in rank 0's log).
    form: str = "json"
    line: str = ""
    # The kit's names of its figures, by its own.
    names: dict[str, str] = field(default_factory=dict)
    # The number that it gives to its first step.
    first_step: int = 1
    # How many it counts for one step.
    iterations: int = 1
    # The step at which it is finished, None if nothing says it.
    total_steps: int | None = None
    # The signal that asks its ranks to save and stop, "" if the stop file does.
    stop: str = ""
    # Its ranks write heartbeat.json; else it is made of the progress that is seen.
    beats: bool = False

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, value: Any) -> "Records | None":
        """Return the records that engine.json holds, None if it is missing or broken."""
        known = {each.name for each in fields(cls)}
        return cls(**value) if isinstance(value, dict) and "name" in value.keys() <= known else None

    def steps(self, folder: Path) -> list[int]:
        """Return the steps of the complete checkpoints in folder, ascending.

        Raises:
            OSError: the folder cannot be read.
        """
        pattern, steps = re.compile(self.checkpoint), []
        for path in folder.iterdir() if self.checkpoint and folder.is_dir() else ():
            match = pattern.fullmatch(path.name)
            if match and not path.is_symlink() and self.is_complete(path):
                steps.append(int(match[1]) + 1 - self.first_step)
        return sorted(steps)

    def is_complete(self, checkpoint: Path) -> bool:
        """Whether the folder of a checkpoint holds what a complete one does."""
        whole = not self.incomplete or not (checkpoint / self.incomplete).exists()
        return whole and any(checkpoint.glob(self.complete))
