"""Exact duplicates: of the rows with the same text the first, or the best, is kept."""

from typing import Any

from plugins.data.errors import DataError
from plugins.data.expressions import column, text_of
from plugins.data.rows import Rows, Work


def exact_duplicates(rows: Rows, work: Work) -> Rows:
    """Keep one row of each text.

    columns: those to compare, by default the text. keep: first, or a column whose highest value is
    kept ("-column": the lowest). normalise: compare lower-case words only.
    """
    names = work.options.get("columns") or ["text"]
    names = [names] if isinstance(names, str) else list(names)
    if work.options.get("normalise"):
        options = {"columns": names, "ranks": _rank_column(work)}
        keys = work.map(rows, "keys", "plugins.data.steps.exact:normal_keys", options).table
    else:
        key = _joined(rows.table, names, work.where)
        chosen = _rank_column(work)
        ranks = {"_rank": column(rows.table, chosen, work.where)} if chosen else {}
        keys = rows.table.select("_id", _key=work.engine.key(key), **ranks)
    rank = order(keys, work, "_rank")
    import ibis

    window = ibis.window(group_by=keys["_key"], order_by=[*rank, keys["_id"].asc()])
    winners = keys.select("_id", kept_id=keys["_id"].first().over(window))
    return work.without(rows, winners.filter(winners["_id"] != winners["kept_id"]))


def order(table: Any, work: Work, name: str | None = None) -> list[Any]:
    """Return an order with the best row of a group first, without the ids."""
    chosen = _rank_column(work)
    if chosen is None:
        return []
    value = table[name] if name else column(table, chosen, work.where)
    lowest = str(work.options.get("keep")).startswith("-")
    return [value.asc(nulls_first=False) if lowest else value.desc(nulls_first=False)]


def _rank_column(work: Work) -> str | None:
    chosen = str(work.options.get("keep") or "first")
    return None if chosen == "first" else chosen.lstrip("-")


def _joined(table: Any, names: list[str], where: str) -> Any:
    if names == ["text"]:
        return text_of(table)
    import ibis

    parts = [column(table, name, where).cast("string").fill_null("\x00") for name in names]
    # With a separator ("ab", "c") differs from ("a", "bc").
    return ibis.literal("\x1f").join(parts)


def normal_keys(table: Any, columns: list[str], ranks: str | None) -> Any:
    """Return ids and a key of the lower-case words of each row's columns."""
    import hashlib

    import pyarrow as pa

    from plugins.data.text import split, texts

    keys = []
    parts = [texts(table, name) for name in columns]
    for row in zip(*(split(part).to_pylist() for part in parts), strict=True):
        key = "\x1f".join(" ".join(words) for words in row)
        keys.append(hashlib.md5(key.encode(), usedforsecurity=False).hexdigest())
    made = {"_id": table["_id"], "_key": pa.array(keys, pa.string())}
    if ranks:
        if ranks not in table.column_names:
            raise DataError(f"exact_duplicates: there is no column {ranks!r} to keep the best by")
        made["_rank"] = table[ranks]
    return pa.table(made)
