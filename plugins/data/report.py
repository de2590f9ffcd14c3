"""The page about a training set: lengths, languages, sources, steps, samples, before and after."""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from plugins.data.expressions import length_bucket
from plugins.data.pipeline import Prepared
from plugins.data.query_engines.base import QueryEngine, shards
from plugins.data.recognisers import hidden
from runspec.prepared import DATA

TEMPLATE = Path(__file__).parent / "templates" / "report.html.j2"
# Columns added by steps whose values are counted.
_COUNTED = ("source", "language")
_MOST_VALUES = 12
# A column with more values than this is an id, not a kind.
_KINDS_AT_MOST = 50


def figures(
    made: Prepared, engine: QueryEngine, version: Path, columns: Collection[str]
) -> dict[str, Any]:
    """Return the page's figures of the rows.

    Args:
        version: the folder of the set, whose rows are written already.
        columns: those of the rows.
    """
    before = lengths(engine, made.start.table)
    return {
        "lengths": _bars(before, _written_lengths(version)),
        "counts": [each for each in _counts(engine, made, version, columns) if each["rows"]],
        "samples": _first_rows(version),
        "bad": made.bad[:10],
    }


def page(
    name: str, card: Mapping[str, Any], lineage: Mapping[str, Any], shown: Mapping[str, Any]
) -> str:
    """Return the page as one self-contained HTML text; shown: the figures."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Also of the set's own rows: they may have kept columns, or there may be no personal_data.
        finalize=lambda value: hidden(value) if isinstance(value, str) else value,
    )
    environment.filters["as_text"] = as_text
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(name=name, card=card, lineage=lineage, **shown)


def as_text(notes: Any) -> str:
    """Return a step's notes as text: "similar pairs 1,234; languages: en 80, de 20"."""
    if not isinstance(notes, Mapping):
        return _figure(notes) if notes is not None else ""
    parts = []
    for name, value in notes.items():
        label = str(name).replace("_", " ")
        if isinstance(value, Mapping):
            inner = ", ".join(f"{str(k).replace('_', ' ')} {_figure(v)}" for k, v in value.items())
            parts.append(f"{label}: {inner or 'none'}")
        else:
            parts.append(f"{label} {_figure(value)}")
    return "; ".join(parts)


def _figure(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _written(version: Path, columns: list[str]) -> Any:
    """Return columns of all rows, read from the written set, so that no step runs again."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts = [pq.read_table(path, columns=columns) for path in shards(version / DATA)]
    return pa.concat_tables(parts)


def _written_lengths(version: Path) -> dict[int, int]:
    import numpy as np

    values = _written(version, ["characters"])["characters"].to_numpy()
    # Exact for integers: the exponent of a float is the position of the highest bit.
    exponents, counts = np.unique(np.frexp((values + 1).astype(float))[1] - 1, return_counts=True)
    return dict(zip(exponents.tolist(), counts.tolist(), strict=True))


def _first_rows(version: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = []
    for path in shards(version / DATA):
        with pq.ParquetFile(path) as file:
            batch = next(file.iter_batches(batch_size=2), None)
            rows += [] if batch is None else batch.to_pylist()
        if len(rows) >= 5:
            break
    return [{key: value for key, value in row.items() if value is not None} for row in rows[:5]]


def lengths(engine: QueryEngine, table: Any) -> dict[int, int]:
    """Return how many rows have texts of 2^k - 1 to 2^(k+1) - 2 characters, by k."""
    counted = table.select(bucket=length_bucket(table))
    rows = engine.rows(counted.group_by("bucket").agg(n=counted.count()))
    return {int(row["bucket"]): int(row["n"]) for row in rows}


def _bars(before: Mapping[int, int], after: Mapping[int, int]) -> list[dict[str, Any]]:
    both = set(before) | set(after)
    most = max([*before.values(), *after.values(), 1])
    return [
        {
            "label": f"{2**k - 1:,} to {2 ** (k + 1) - 2:,}",
            "before": before.get(k, 0),
            "after": after.get(k, 0),
            "before_width": math.ceil(100 * before.get(k, 0) / most),
            "after_width": math.ceil(100 * after.get(k, 0) / most),
        }
        for k in range(min(both, default=0), max(both, default=-1) + 1)
    ]


def _counts(
    engine: QueryEngine, made: Prepared, version: Path, columns: Collection[str]
) -> list[dict[str, Any]]:
    """Count the values of columns of few values, before and after."""
    import pyarrow.compute as pc

    first = made.start.table
    kept = [name for name in first.columns[6:] if first[name].type().is_string()]
    tables = []
    for name in [*(each for each in _COUNTED if each in columns), *kept]:
        counted = pc.value_counts(_written(version, [name])[name]).to_pylist()
        after = {str(each["values"]): int(each["counts"]) for each in counted}
        if len(after) > _KINDS_AT_MOST:
            continue
        before = _values(engine, first, name) if name in first.columns else {}
        ordered = sorted(after, key=lambda value: (-after[value], value))[:_MOST_VALUES]
        rows = [(value, before.get(value), after[value]) for value in ordered]
        tables.append({"column": name, "rows": rows, "whole": sum(after.values()) or 1})
    return tables


def _values(engine: QueryEngine, table: Any, name: str) -> dict[str, int]:
    counted = table.group_by(name).agg(n=table.count())
    rows = engine.rows(counted.order_by(counted.n.desc()).limit(_KINDS_AT_MOST + 1))
    return {str(row[name]): int(row["n"]) for row in rows}
