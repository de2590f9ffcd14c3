"""What an entry needs beside its ranks, as a class that the supervisor calls.

The job script names it: python -P -m slurm.supervise --companion MODULE:CLASS -- srun ...
"""

import importlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from slurm.nodes import Nodes


class Companion:
    """Does nothing; a subclass overrides the moments that it needs.

    It may keep the run's records (progress.json, metrics.jsonl, heartbeat.json), and start
    processes of its own, which it ends. A cause is a runspec.failure.fault in the attempt's
    logs, error_NAME.json: the attempt's end is judged by it.

    It is made anew if the supervisor was killed, and finds again what it has started. A method that
    raises OSError, because a file cannot be read or written now, is called again.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def prepare(self) -> None:
        """Before an attempt is recorded, once or more often; DamagedFile: the run fails."""

    def begin(self, attempt: int, nodes: Nodes, step: Sequence[str]) -> None:
        """An attempt begins, or goes on after the supervisor was killed.

        Args:
            nodes: those of the attempt.
            step: srun and its options for one task beside the ranks, [] without Slurm.
        """

    def look(self) -> None:
        """About once a second while the ranks run; after another exception than OSError no more."""

    def end(self) -> None:
        """The ranks have ended, and no attempt of this job follows."""

    def settle(self, attempt: int, exit_code: int, stop_asked: bool) -> None:
        """Before the end of an attempt is judged, once or more often.

        Args:
            exit_code: that of the ranks.
            stop_asked: they were asked to save and stop.

        Raises:
            DamagedFile: a fault of the attempt.
        """

    def clean(self) -> None:
        """Remove what is of no use after the run: Slurm ends the job, within seconds."""


def load(name: str, run_dir: Path) -> Companion:
    """Return the companion MODULE:CLASS of a run, the one that does nothing for "".

    Raises:
        ImportError: it is not in the code that was submitted with the run.
    """
    if not name:
        return Companion(run_dir)
    module, _, kind = name.partition(":")
    found, code = importlib.util.find_spec(module), Path(os.environ["COOKBOOK"]).resolve()
    if not (found and found.origin and Path(found.origin).resolve().is_relative_to(code)):
        raise ImportError(f"the companion {name} is not in the run's copy of the code, {code}")
    companion: Companion = getattr(importlib.import_module(module), kind)(run_dir)
    return companion
