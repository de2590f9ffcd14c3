"""Filters by a condition and by length. A condition that is null counts as false."""

from typing import Any

from plugins.data.expressions import column
from plugins.data.expressions import condition as parse
from plugins.data.rows import Rows, Work


def condition(rows: Rows, work: Work) -> Rows:
    """Keep the rows that meet `where`."""
    return keep(rows, work, parse(work.options["where"], rows.table, work.where))


def length(rows: Rows, work: Work) -> Rows:
    """Keep the rows whose text has `min` to `max` characters (Unicode code points)."""
    text = column(rows.table, work.options.get("column", "text"), work.where)
    return keep(rows, work, between(text.length(), work.options))


def between(value: Any, options: Any) -> Any:
    """Return the condition that a value is between min and max, if they are given."""
    import ibis

    met = ibis.literal(True)
    if options.get("min") is not None:
        met = value >= options["min"]
    if options.get("max") is not None:
        below = value <= options["max"]
        met = below if options.get("min") is None else met & below
    return met


def keep(rows: Rows, work: Work, met: Any) -> Rows:
    """Keep the rows for which a boolean expression is true, and record the others."""
    met = met.fill_null(False)
    work.remember("removed", rows.table.filter(~met).select("_id"))
    return rows.kept(rows.table.filter(met), rows.count - work.rows_of("removed"))
