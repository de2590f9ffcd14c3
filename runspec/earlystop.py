"""When a run of a sweep is clearly worse than the others: the median rule. Standard library only.

A run is stopped if its metric, averaged over its newest logged steps, is worse than the median of
the other runs at the same step, by a margin (the median stopping rule of Google Vizier, Golovin et
al. 2017, section 3.2.1, with a margin and without its running best).
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

# Key of `early_stop` in a sweep -> its default.
KEYS: dict[str, Any] = {
    "metric": "loss",  # of metrics.jsonl; lower is better
    "after_steps": 20,  # nothing is stopped before
    "worse_by": 0.1,  # of the median: 0.1 = a tenth
    "others": 2,  # number of other runs that must have come as far
    "every_s": 15.0,  # between two looks at the others' metrics
}
# The loss of one step says little: this many logged ones are averaged.
_AVERAGED = 5


def at(rows: Iterable[Mapping[str, Any]], metric: str, step: int) -> float | None:
    """Return the mean of a run's newest values up to a step, None if it has not come so far.

    Args:
        rows: lines of metrics.jsonl, in order.
    """
    values, reached = [], False
    for row in rows:
        value, now = row.get(metric), row.get("step")
        if not isinstance(now, int):
            continue
        reached = reached or now >= step
        if now <= step and isinstance(value, int | float) and value == value:
            values.append(float(value))
    return fmean(values[-_AVERAGED:]) if values and reached else None


def verdict(
    own: Sequence[Mapping[str, Any]],
    others: Sequence[Sequence[Mapping[str, Any]]],
    given: Mapping[str, Any],
) -> str:
    """Return why a run is to be stopped, "" if it may go on.

    Args:
        own, others: lines of metrics.jsonl of this run and of each other one.
        given: `early_stop` of the sweep; what it leaves out is as in KEYS.
    """
    rule = {**KEYS, **given}
    metric = str(rule["metric"])
    steps = [row["step"] for row in own if isinstance(row.get("step"), int) and metric in row]
    if not steps or steps[-1] < rule["after_steps"]:
        return ""
    step = steps[-1]
    mine = at(own, metric, step)
    known = [value for rows in others if (value := at(rows, metric, step)) is not None]
    if mine is None or len(known) < rule["others"]:
        return ""
    middle = median(known)
    if mine <= middle + rule["worse_by"] * abs(middle):
        return ""
    return (
        f"stopped early by its sweep: {metric} {mine:.4g} at step {step}, and the median of "
        f"{len(known)} other runs is {middle:.4g}"
    )
