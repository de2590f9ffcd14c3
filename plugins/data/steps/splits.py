"""Splits train, val, test by groups, so that nothing leaks; deterministic.

A group's split depends on a hash of the seed and the group's key, and does not change when rows are
added. With stratify the groups of each stratum are sorted by that hash and cut at the shares, so
that each stratum has these shares; then new rows may move the cuts.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from plugins.data.expressions import column, text_of
from plugins.data.rows import Rows, Work
from plugins.data.steps.components import components


def split(rows: Rows, work: Work) -> Rows:
    """Add the column `split` to the rows."""
    options = work.options
    shares = {str(name): float(value) for name, value in options["shares"].items()}
    names = options.get("group") or []
    names = [names] if isinstance(names, str) else [str(name) for name in names]
    if "near_group" in rows.table.columns and "near_duplicates" not in names:
        names.append("near_duplicates")
    names = ["near_group" if name == "near_duplicates" else name for name in names]
    if not options.get("stratify"):
        if (key := _own_key(rows.table, work, names)) is not None:
            return rows.kept(rows.table.mutate(split=_by_hash(key, shares, work.seed)), rows.count)
        keyed = _keyed(rows, work, names)
        placed = keyed.select("_id", split=_by_hash(keyed["_key"], shares, work.seed))
    else:
        # It is read several times.
        keyed = work.remember("keys", _keyed(rows, work, names))
        placed = _laid_out(rows, work, keyed, shares)
    sides = work.remember("sides", placed)
    return rows.kept(rows.table.inner_join(sides, "_id"), rows.count)


def _own_key(table: Any, work: Work, names: list[str]) -> Any:
    """Return a row's key if it is in the row itself: its text, or the only column to group by."""
    own = text_of(table).hexdigest("md5")
    if not names:
        # The same text is never in two splits.
        return own
    if len(names) == 1 and names != ["near_group"]:
        return column(table, names[0], work.where).cast("string").fill_null(own)
    return None


def _keyed(rows: Rows, work: Work, names: list[str]) -> Any:
    """(_id, _key): rows of one key stay together."""
    table = rows.table
    if (key := _own_key(table, work, names)) is not None:
        return table.select("_id", _key=key)
    own = text_of(table).hexdigest("md5")
    columns = {name: column(table, name, work.where).cast("string") for name in names}
    parts = work.remember("parts", table.select("_id", _own=own, **columns))
    # Each row is in a group, even if it is the only one.
    pairs = parts.select(a="_id", b="_id")
    for name in names:
        given = parts.filter(parts[name].notnull())
        firsts = given.group_by(name).agg(b=given["_id"].min())
        pairs = pairs.union(given.inner_join(firsts, name).select(a="_id", b="b"))
    groups = components(work, work.remember("pairs", pairs))
    members = parts.inner_join(groups.select(_id="node", _group="label"), "_id")
    # The lowest hash of its texts, not an id, so that the key does not change with other rows.
    keys = members.group_by("_group").agg(_key=members["_own"].min())
    return work.remember("keyed", members.inner_join(keys, "_group").select("_id", "_key"))


def _hash(key: Any, seed: int) -> Any:
    import ibis

    return (ibis.literal(f"{seed}:") + key).hexdigest("md5").substr(0, 8)


def _by_hash(key: Any, shares: dict[str, float], seed: int) -> Any:
    """Return a key's split: 32 bits of its hash, compared as text with the ends of the shares."""
    value = _hash(key, seed)
    return _side(shares, lambda end: value < f"{min(int(end * 2**32), 2**32 - 1):08x}")


def _side(shares: dict[str, float], is_below: Callable[[float], Any]) -> Any:
    """Return the name of the first share whose end, from 0 to 1, is above a value."""
    import ibis

    *ends, (last, _) = zip(shares, accumulate(shares.values()), strict=True)
    branches = [(is_below(end), ibis.literal(name)) for name, end in ends]
    return ibis.cases(*branches, else_=ibis.literal(last)) if branches else ibis.literal(last)


def _laid_out(rows: Rows, work: Work, keyed: Any, shares: dict[str, float]) -> Any:
    """(_id, split) with the shares in each stratum."""
    import ibis

    stratum = column(rows.table, work.options["stratify"], work.where)
    strata = rows.table.select("_id", _stratum=stratum.cast("string").fill_null(""))
    both = work.remember("strata", keyed.inner_join(strata, "_id"))
    # A group's stratum is the one of most of its rows.
    counts = both.group_by("_key", "_stratum").agg(n=both.count())
    best = ibis.window(
        group_by=counts["_key"], order_by=[counts.n.desc(), counts["_stratum"].asc()]
    )
    chosen = counts.select("_key", stratum=counts["_stratum"].first().over(best)).distinct()
    sizes = both.group_by("_key").agg(n=both.count())
    groups = sizes.inner_join(chosen, "_key")
    groups = groups.mutate(_hash=_hash(groups["_key"], work.seed))
    laid = ibis.window(
        group_by=groups.stratum, order_by=[groups["_hash"].asc(), groups["_key"].asc()], following=0
    )
    total = ibis.window(group_by=groups.stratum)
    # The middle of a group among the rows of its stratum, doubled to stay whole.
    placed = groups.mutate(
        _middle=groups.n.sum().over(laid) * 2 - groups.n, _all=groups.n.sum().over(total) * 2
    )
    million = 1_000_000
    side = _side(
        shares, lambda end: placed["_middle"] * million < placed["_all"] * round(end * million)
    )
    sides = work.remember("group_sides", placed.select("_key", split=side))
    return keyed.inner_join(sides, "_key").select("_id", "split")
