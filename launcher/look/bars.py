"""Memory and time of several runs as bars, for the report; what ran out of memory is marked."""

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.look.text import duration

# In the drawing's own units: its width, where bars begin and end, and the height of a run's row.
WIDTH, LEFT, RIGHT, ROW = 720, 220, 610, 26
_LABEL = 32


def memory(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the bars of each run's memory per GPU, None if nothing is known of any.

    Args:
        rows: outcomes of runs.
    """
    return _drawn(
        "Memory per GPU (GiB): predicted above, measured below",
        rows,
        [
            ("predicted", [row.get("peak_predicted_gib") for row in rows]),
            ("measured", [row.get("peak_measured_gib") for row in rows]),
        ],
        lambda value: f"{value:,.{1 if value >= 1 else 2}f}",
    )


def time(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the bars of the time that each run has taken, None if none has begun."""
    taken = [row.get("used_s") for row in rows]
    return _drawn("Time, all attempts", rows, [("measured", taken)], duration)


def _drawn(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    series: Sequence[tuple[str, list[Any]]],
    text_of: Any,
) -> dict[str, Any] | None:
    failed = [row.get("state") == "OUT_OF_MEMORY" for row in rows]
    # What does not fit may be larger than everything else together: its bar is cut.
    values = [value for _, given in series for value in given if isinstance(value, int | float)]
    if not values:
        return None
    kept = [
        value
        for _, given in series
        for value, bad in zip(given, failed, strict=True)
        if isinstance(value, int | float) and not bad
    ]
    longest = max(kept) * 1.25 if kept else max(values)
    longest = longest or 1.0
    drawn = []
    for number, row in enumerate(rows):
        top, thick = 8 + number * ROW, (ROW - 10) / len(series)
        bars = []
        for place, (kind, given) in enumerate(series):
            value = given[number]
            if not isinstance(value, int | float):
                continue
            share = min(1.0, value / longest)
            mark = " (beyond the drawing)" if value > longest else ""
            bars.append(
                {
                    "kind": kind,
                    "y": f"{top + place * thick:.1f}",
                    "width": f"{max(1.0, (RIGHT - LEFT) * share):.1f}",
                    "height": f"{thick - 1:.1f}",
                    "words": f"{kind}: {text_of(value)}{mark}",
                }
            )
        name = str(row.get("cell") or row["run"])
        newest = next((given[number] for _, given in series[::-1] if given[number] is not None), "")
        label = text_of(newest) if isinstance(newest, int | float) else ""
        drawn.append(
            {
                "name": name if len(name) <= _LABEL else f"{name[: _LABEL - 3]}...",
                "whole": f"{name} ({row['run']})" if row.get("cell") else name,
                "y": top + (ROW - 10) / 2,
                "bars": bars,
                "top": top,
                "height": ROW - 11,
                "failed": failed[number],
                "told": "out of memory" if failed[number] else label,
            }
        )
    return {
        "title": title,
        "width": WIDTH,
        "left": LEFT,
        "right": RIGHT,
        "height": 12 + len(rows) * ROW,
        "rows": drawn,
    }
