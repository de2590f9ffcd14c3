"""Curves of a run's logged steps, thinned so that every peak and dip is kept."""

import math
from collections.abc import Sequence
from itertools import pairwise

from launcher.look.text import is_number
from launcher.run.directory import Run

Point = tuple[float, float]
# A curve has this many points at most: as many as a wide screen has columns.
MOST_POINTS = 2000


def read(run: Run, names: Sequence[str]) -> dict[str, list[Point]]:
    """Return the curves that a run has, by name; a damaged line of its metrics is left out."""
    points: dict[str, list[Point]] = {name: [] for name in names}
    for row in run.metrics:
        step = row.get("step")
        if is_number(step):
            for name, line in points.items():
                if is_number(value := row.get(name)):
                    line.append((step, value))
    return {name: thinned(line) for name, line in points.items() if line}


def thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most MOST_POINTS points: of each part of a curve its lowest and its highest one."""
    if len(points) <= MOST_POINTS:
        return list(points)
    parts = MOST_POINTS // 2 - 1  # and the ends
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
