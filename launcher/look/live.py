"""The live view of runs on a terminal: progress, loss curve, speed, attempts, newest lines."""

import math
import re
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launcher.look.lines import Growing, tail_start
from launcher.look.logs import Tail
from launcher.look.status import row
from launcher.look.text import duration, number, percent, plain
from launcher.look.watch import States
from launcher.plugins import hooks
from launcher.run.directory import Run, Snapshot
from launcher.run.states import State
from runspec import files

_BARS = "▁▂▃▄▅▆▇█"
_COLOURS = {"COMPLETED": "green", "RUNNING": "cyan", "FAILED": "red"}
# Number of logged steps that are shown, and of lines of a log that are kept.
_STEPS, _LINES = 4000, 50
_NOTHING = State("...", "nobody", "querying Slurm")
# From a Run, its State and its newest logged steps, oldest first, to lines of a plug-in.
_HOOK = "live_lines"
# The trainer's line of a step (trainer/metrics.py).
_STEP = re.compile(r"step +\d+/\d+  ")


class View:
    """What is shown of one run; it reads what is new in its files at every look."""

    def __init__(self, run: Run) -> None:
        self.run = run
        metrics = run.path / files.METRICS
        self._metrics = Growing(metrics, tail_start(metrics, _STEPS))
        self._losses: dict[int, float] = {}
        self._rewards: dict[int, float] = {}
        self._rows: deque[dict[str, Any]] = deque(maxlen=_LINES)
        self._tail = Tail(run)
        self._lines: deque[str] = deque(maxlen=_LINES)

    def _look(self) -> None:
        while lines := self._metrics.new_lines():
            for line in lines:
                try:
                    logged = files.parse_json(line)
                    step, loss = logged["step"], logged["loss"]
                except (ValueError, KeyError, TypeError):
                    continue
                self._rows.append(logged)
                if isinstance(loss, int | float) and math.isfinite(loss):
                    # Steps that were done again replace those that were lost.
                    self._losses[step] = loss
                if isinstance(reward := logged.get("reward"), int | float):
                    self._rewards[step] = reward
        while lines := self._tail.new_lines():
            for line in lines:
                line = plain(line.rpartition("\r")[2])
                # The newest step is enough: the curve shows the others.
                if self._lines and _STEP.match(line) and _STEP.match(self._lines[-1]):
                    self._lines.pop()
                self._lines.append(line)

    def panel(self, state: State, width: int, height: int) -> RenderableType:
        """Return the view of the run, in this many lines."""
        self._look()
        run = Snapshot(self.run.path)
        colour = _COLOURS.get(state.word, "yellow")
        parts: list[RenderableType] = []
        if state.detail:
            parts.append(Text(plain(state.detail), style="dim", no_wrap=True, overflow="ellipsis"))
        parts += [self._progress(run, state), *self._curve(width - 4)]
        own = (line for lines in hooks(_HOOK) for line in lines(run, state, self._rows))
        parts += [Text(plain(line), no_wrap=True, overflow="ellipsis") for line in own]
        parts.append(self._speed(run))
        attempts = [_attempt(each) for each in run.attempts[-3:]]
        parts += [Text(each, no_wrap=True, overflow="ellipsis") for each in attempts]
        room = max(1, height - len(parts) - 2)
        newest = list(self._lines)[-room:]
        parts += [Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in newest]
        title = Text(f"{self.run.name}  ").append(state.word, style=f"bold {colour}")
        return Panel(Group(*parts), title=title, title_align="left", border_style=colour)

    def _progress(self, run: Run, state: State) -> RenderableType:
        known = row(run, state)
        step, total, left = known["step"] or 0, known["total_steps"], known["left_s"]
        parts = [f"step {step}/{total or '?'}", known["part"] or ""]
        parts += ["" if known["used_s"] is None else f"used {duration(known['used_s'])}"]
        parts += ["" if left is None else f"about {duration(left)} left"]
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True)
        done = isinstance(total, int) and isinstance(step, int)
        bar = ProgressBar(total or 1, step if done else 0, complete_style="cyan")
        grid.add_row(bar, Text(", ".join(filter(None, parts))))
        return grid

    def _curve(self, width: int) -> list[RenderableType]:
        lines: list[RenderableType] = []
        for name, values in (("loss", self._losses), ("reward", self._rewards)):
            if points := list(values.values()):
                text = f"{name} {points[0]:.4g} -> {points[-1]:.4g}  "
                line = sparkline(points, max(8, width - len(text)))
                lines.append(Text(text).append(line, style="cyan"))
        return lines

    def _speed(self, run: Run) -> RenderableType:
        newest = run.newest_metrics
        gpu, host = newest.get("peak_memory_reserved_gb"), newest.get("memory_rss_gb")
        parts = [
            number(newest.get("tokens_per_second_per_gpu"), ",.0f", " tokens/s per GPU"),
            f"MFU {percent(newest.get('mfu'))}",
            f"GPU memory {number(gpu, '.1f', ' GiB')}",
            f"CPU memory per rank {number(host, '.1f', ' GiB')}",
            f"lr {number(newest.get('lr'), '.2e')}",
        ]
        known = [each for each in parts if not each.endswith("-")]
        return Text(", ".join(known) or "no step is logged yet", no_wrap=True, overflow="ellipsis")


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a curve in this many characters: the mean of each part, the highest bar the most."""
    count = min(width, len(values))
    bounds = [len(values) * k // count for k in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def _attempt(record: dict[str, Any]) -> str:
    message = f": {record['message']}" if record.get("message") else ""
    return plain(f"attempt {record.get('attempt')} {record.get('cause')}{message}")


def watch_live(runs: Sequence[Run]) -> list[State]:
    """Show runs until they have ended; return their last states."""
    console, views = Console(), [View(run) for run in runs]
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for known in States().followed(runs, 1.0):
            height = max(8, (console.height - 1) // len(runs))
            panels = [
                view.panel(known[view.run.name] or _NOTHING, console.width, height)
                for view in views
            ]
            live.update(Group(*panels), refresh=True)
    return [state for state in known.values() if state is not None]
