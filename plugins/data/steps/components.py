"""Connected components of pairs, as ibis expressions on any engine."""

from typing import Any

from plugins.data.errors import DataError
from plugins.data.rows import Work

# Each round at least doubles the distance of a label; this many rounds suffice for 2^40 pairs.
_ROUNDS = 60


def components(work: Work, pairs: Any) -> Any:
    """Return (node, label) for each node of pairs (a, b); label: the lowest node connected to it.

    In each round a node gets the lowest label of its neighbours, and then its label's label.
    """
    both = pairs.select("a", "b").union(pairs.select(a="b", b="a"))
    own = pairs.select(a="a", b="a").union(pairs.select(a="b", b="b"))
    edges = work.remember("edges", both.union(own, distinct=True))
    labels = work.remember("labels-00", edges.group_by("a").agg(label=edges.b.min()))
    for number in range(1, _ROUNDS):
        near = labels.select(b="a", label="label")
        met = edges.join(near, "b")
        low = met.group_by("a").agg(label=met.label.min())
        low = work.remember(f"low-{number:02d}", low)
        jump = low.select(label="a", lower="label")
        next_labels = low.join(jump, "label").select("a", label="lower")
        made = work.remember(f"labels-{number:02d}", next_labels)
        old = labels.select("a", old="label")
        pair = made.join(old, "a")
        changed = work.engine.one(pair.agg(n=(pair.label != pair.old).sum()))["n"]
        labels = made
        if not changed:
            work.notes["component_rounds"] = number
            return labels.select(node="a", label="label")
    raise DataError(f"{work.where}: groups are not found after {_ROUNDS} rounds: report this")
