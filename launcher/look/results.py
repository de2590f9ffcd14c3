"""Runs side by side: the settings that differ against what came of them."""

import csv
import io
import json
from collections.abc import Callable, Sequence
from typing import Any

from launcher.errors import UsageFault, nearest
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
FORMATS = ("table", "csv", "json")


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


def ordered(rows: list[Result], by: str | None) -> list[Result]:
    """Return rows sorted by a key, -key for the highest first; those that lack it come last.

    By default it is val_loss if a run has one, else the mean loss of the last 10 % of the steps.
    """
    if by is None:
        validated = any(row["val_loss"] is not None for row in rows)
        by = "val_loss" if validated else "loss_last_tenth"
    key, falling = by.removeprefix("-"), by.startswith("-")
    known = [*(rows[0] if rows else ()), *(rows[0]["settings"] if rows else ())]
    if rows and key not in known:
        given = ", ".join(name for name in known if name != "settings")
        raise UsageFault(f"--sort {by}: there is no such column{nearest(key, known)}: {given}")

    def value(row: Result) -> Any:
        return row[key] if key in row else row["settings"].get(key)

    have = [row for row in rows if value(row) is not None]
    mixed = len({isinstance(value(row), int | float) for row in have}) > 1
    have.sort(key=lambda row: str(value(row)) if mixed else value(row), reverse=falling)
    return [*have, *(row for row in rows if value(row) is None)]


def shown(rows: Sequence[Result], keys: Sequence[str], form: str) -> str:
    """Return rows as table, csv or json."""
    if form == "json":
        return json.dumps(list(rows), indent=1)
    if form == "csv":
        text = io.StringIO()
        names = [name for name in rows[0] if name != "settings"]
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*names, *map(plain, keys)])
        for row in rows:
            settings = (_value(row["settings"][key]) for key in keys)
            writer.writerow([*(_harmless(row[name]) for name in names), *map(_harmless, settings)])
        return text.getvalue().rstrip("\n")
    lines = cells(rows, keys)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


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


def _harmless(value: Any) -> Any:
    """A spreadsheet would compute text that begins like a formula; a terminal obeys others."""
    if not isinstance(value, str):
        return value
    value = plain(value)
    return f"'{value}" if value[:1] in "=+@\t" else value
