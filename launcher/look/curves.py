"""Curves of a run's logged steps, thinned so that every peak and dip is kept."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from launcher.look.text import is_number
from launcher.run.directory import Run

Point = tuple[float, float]
# A curve has this many points at most: as many as a wide screen has columns.
MOST_POINTS = 2000


@dataclass
class Curves:
    """A run's metrics by name, and the steps at which its attempts began."""

    run: str
    points: dict[str, list[Point]] = field(default_factory=dict)
    attempts: list[tuple[float, str]] = field(default_factory=list)

    @property
    def last_step(self) -> float:
        return max((line[-1][0] for line in self.points.values() if line), default=0.0)


def read(run: Run, names: Sequence[str]) -> Curves:
    """Return the curves of a run; a line of its metrics that is cut short is left out."""
    curves = Curves(run.name, {name: [] for name in names})
    times: list[Point] = []
    for row in run.metrics:
        step, when = row.get("step"), row.get("time")
        if not is_number(step):
            continue
        if is_number(when):
            times.append((when, step))
        for name in names:
            value = row.get(name)
            if is_number(value):
                curves.points[name].append((step, value))
    curves.points = {name: thinned(line) for name, line in curves.points.items() if line}
    ended = run.attempts
    for attempt in [*ended[1:], *([run.status] if ended else [])]:
        began = attempt.get("started")
        if is_number(began) and attempt.get("attempt") != ended[0].get("attempt"):
            step = next((step for when, step in times if when >= began), None)
            mark = f"attempt {attempt.get('attempt')}"
            if step is not None and mark not in [label for _, label in curves.attempts]:
                curves.attempts.append((step, mark))
    return curves


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Return at most this many points: of each part of the curve its lowest and its highest one."""
    if len(points) <= most:
        return list(points)
    parts = most // 2 - 1  # and the ends
    bounds = [len(points) * k // parts for k in range(parts + 1)]
    kept: list[Point] = []
    for begin, end in pairwise(bounds):
        part = range(begin, end)
        low = min(part, key=lambda k: points[k][1])
        high = max(part, key=lambda k: points[k][1])
        kept += [points[k] for k in sorted({low, high})]
    first = [points[0]] if kept[0] != points[0] else []
    last = [points[-1]] if kept[-1] != points[-1] else []
    return [*first, *kept, *last]


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Return round numbers between two, about as many as wanted."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, wanted - 1)
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * k for k in (1, 2, 5, 10) if unit * k >= rough)
    first = math.ceil(low / step)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]
