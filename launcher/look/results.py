"""Runs side by side: the settings that differ against what came of them."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from launcher.look.outcome import outcome, resolved, settings
from launcher.look.text import number, percent, plain
from launcher.run.directory import Run
from launcher.run.states import judged

Result = dict[str, Any]

# Key of an outcome -> heading and how a person reads it.
_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "run": ("RUN", str),
    "cell": ("CELL", str),
    "state": ("STATE", str),
    "step": ("STEP", lambda value: number(value, ",")),
    "val_loss": ("VAL LOSS", lambda value: number(value, ".4f")),
    "best_val_loss": ("LOWEST", lambda value: number(value, ".4f")),
    "loss_last_tenth": ("LOSS (LAST 10 %)", lambda value: number(value, ".4f")),
    "tokens_per_second_per_gpu": ("TOK/S/GPU", lambda value: number(value, ",.0f")),
    "mfu": ("MFU", percent),
    "peak_predicted_gib": ("PREDICTED GiB", lambda value: number(value, ".2f")),
    "peak_measured_gib": ("MEASURED GiB", lambda value: number(value, ".2f")),
    "gpu_hours": ("GPU-HOURS", lambda value: number(value, ",.3g")),
    "cost": ("COST", lambda value: number(value, ",.2f")),
}
# A setting is cut to this many characters where a person reads it.
_WIDEST = 32


def compare(runs: Sequence[Run], price: float | None = None) -> tuple[list[Result], list[str]]:
    """Return the outcome of each run with its settings that differ, and the keys of those.

    Args:
        price: of a GPU-hour.
    """
    known: dict[str, Result] = {}
    for run, state in judged(runs):
        recipe = resolved(run)
        known[run.name] = {**outcome(run, state, recipe), "settings": settings(recipe)}
    chosen = [known[name]["settings"] for name in sorted(known)]
    keys = [
        key
        for key in dict.fromkeys(key for given in chosen for key in given)
        if any(given.get(key) != chosen[0].get(key) for given in chosen)
    ]
    rows = []
    for name in sorted(known):
        row = known[name]
        hours = row["gpu_hours"]
        cost = None if hours is None or price is None else round(hours * price, 2)
        differing = {key: row["settings"].get(key) for key in keys}
        rows.append({**row, "cost": cost, "settings": differing})
    return rows, keys


def ordered(rows: Sequence[Result]) -> list[Result]:
    """Return rows by their val_loss if a run has one, else by the mean loss of the last 10 % of the
    steps, the lowest first; those that lack it come last.
    """
    validated = any(row["val_loss"] is not None for row in rows)
    by = "val_loss" if validated else "loss_last_tenth"
    return sorted(rows, key=lambda row: (row[by] is None, row[by] or 0.0))


def table(rows: Sequence[Result], keys: Sequence[str]) -> Iterator[str]:
    """Yield the lines of rows for a person to read."""
    lines = cells(rows, keys)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        texts = (f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True))
        yield "  ".join(texts).rstrip()


def cells(rows: Sequence[Result], keys: Sequence[str]) -> list[list[str]]:
    """Return the texts of a table with its headings; a figure that no run has is no column."""
    columns = [name for name in _COLUMNS if any(row[name] is not None for row in rows)]
    heads = [*(_COLUMNS[name][0] for name in columns), *keys]
    lines = [
        [
            *(_COLUMNS[name][1](row[name]) if row[name] is not None else "-" for name in columns),
            *(_cut(_value(row["settings"][key])) for key in keys),
        ]
        for row in rows
    ]
    return [[plain(cell) for cell in line] for line in (heads, *lines)]


def _value(value: Any) -> str:
    return "-" if value is None else json.dumps(value) if isinstance(value, list) else str(value)


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."
