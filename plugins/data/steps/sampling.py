"""Mixtures of sources by weight, and caps on the rows of a group; deterministic."""

from typing import Any

from plugins.data.errors import DataError
from plugins.data.expressions import column, text_of
from plugins.data.rows import Rows, Work
from plugins.data.steps.exact import order
from runspec.hints import nearest


def mixture(rows: Rows, work: Work) -> Rows:
    """Keep a share of the rows of each source by weight.

    weights: by source; sources without a weight are left out. rows: the total; by default as many
    as possible without using a row twice.
    """
    weights = {str(name): float(value) for name, value in work.options["weights"].items()}
    table = rows.table
    counts = work.engine.rows(table.group_by("source").agg(n=table.count()))
    have = {row["source"]: row["n"] for row in counts}
    if unknown := [name for name in weights if name not in have]:
        raise DataError(
            f"{work.where}: no rows are of the source {unknown[0]!r}{nearest(unknown[0], have)}; "
            f"there are {', '.join(sorted(have)) or 'none'}",
            exit_code=2,
        )
    whole = sum(weights.values())
    most = min(have[name] * whole / weight for name, weight in weights.items())
    wanted = work.options.get("rows") or int(most)
    take = {name: int(wanted * weight / whole) for name, weight in weights.items()}
    if short := [name for name in take if take[name] > have[name]]:
        name = short[0]
        raise DataError(
            f"{work.where}: {wanted} rows need {take[name]:,} of {name}, which has {have[name]:,}: "
            f"set rows={int(most)} or less, or another weight",
            exit_code=2,
        )
    work.notes["taken"] = take
    import ibis

    limit = ibis.cases(*((table.source == name, count) for name, count in take.items()), else_=0)
    return _first(rows, work, table.source, [_lot(table, work.seed)], limit)


def cap(rows: Rows, work: Work) -> Rows:
    """Keep at most `rows` rows of each value of `by`, chosen by hash or by `keep`."""
    table = rows.table
    group = column(table, work.options["by"], work.where)
    best = order(table, work) or [_lot(table, work.seed)]
    return _first(rows, work, group, best, work.options["rows"])


def _lot(table: Any, seed: int) -> Any:
    """Return a hash by which rows are chosen: it depends on their content, not on their place."""
    import ibis

    return (ibis.literal(f"{seed}:") + text_of(table)).hexdigest("md5").asc()


def _first(rows: Rows, work: Work, group: Any, best: list[Any], limit: Any) -> Rows:
    import ibis

    table = rows.table
    window = ibis.window(group_by=group, order_by=[*best, table["_id"].asc()])
    placed = table.select("_id", _place=ibis.row_number().over(window), _limit=limit)
    return work.without(rows, placed.filter(placed["_place"] >= placed["_limit"]).select("_id"))
