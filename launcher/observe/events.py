"""A run's metrics.jsonl as TensorBoard's event files, while TensorBoard is open.

The kit's trainer writes event files itself. Of other trainers and of scripts the launcher has
metrics.jsonl, with the kit's names of its figures.
"""

import math
import threading
from collections.abc import Sequence
from pathlib import Path

from launcher.observe.lines import Growing
from launcher.runs.directory import Run
from runspec import files

_EVERY_S = 5.0
_NOT_SHOWN = ("step", "time", "left_s", "epoch_step", "attempt")


class Feed:
    """Writes the metrics of a run into a folder as far as they are there, at each call of `more`.

    A step that was trained again after a retry is shown as it was the last time.
    """

    def __init__(self, run: Run, folder: Path) -> None:
        # Imported late: only this command needs it.
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._metrics, self._last = Growing(run.path / files.METRICS), 0
        self._writer = EventFileWriter(str(folder))

    def more(self) -> None:
        """Write what is new."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        while lines := self._metrics.new_lines():
            for line in lines:
                try:
                    row = files.parse_json(line)
                    step, when = int(row["step"]), float(row.get("time") or 0.0)
                except (ValueError, KeyError, TypeError):
                    continue
                values = [
                    Summary.Value(tag=name, simple_value=value)
                    for name, value in row.items()
                    if name not in _NOT_SHOWN and isinstance(value, int | float)
                    if math.isfinite(value)
                ]
                if step < self._last:
                    # TensorBoard drops what an earlier attempt wrote from this step on.
                    start = SessionLog(status=SessionLog.START)
                    event = Event(wall_time=when, step=step, session_log=start)
                    self._writer.add_event(event)
                self._last = step
                summary = Summary(value=values)
                self._writer.add_event(Event(wall_time=when, step=step, summary=summary))
        self._writer.flush()


def is_fed(run: Run) -> bool:
    """Whether the curves of a run are made of its metrics.jsonl."""
    if (run.path / files.ENGINE).exists():
        return True
    return (run.path / files.METRICS).exists() and not (run.path / files.TENSORBOARD).exists()


def feed(runs: Sequence[Run], folder: Path, done: threading.Event) -> None:
    """Write runs into folders of their names, and what is new of them, until done is set."""
    feeds = [Feed(run, folder / run.name) for run in runs]
    while True:
        for each in feeds:
            each.more()
        if done.wait(_EVERY_S):
            return
