"""Checks the columns that a recipe's steps need, before a row is read."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from plugins.data.datarecipe import STEPS, step_name, step_options
from plugins.data.errors import DataError
from plugins.data.expressions import column, condition
from plugins.data.steps.personal import region_faults
from plugins.data.steps.templates import template_faults

TYPES = {"number": "float64", "whole": "int64", "flag": "boolean", "text": "string"}
_OWN = ("source", "prompt", "answer", "messages", "rejected")


def check(config: Mapping[str, Any], all_keep: Mapping[str, str]) -> None:
    """Raise DataError with every fault of the steps' conditions, columns and templates.

    Args:
        all_keep: the kept columns of all sources and their kinds.
    """
    import ibis

    known = {"_id": "int64", **dict.fromkeys(_OWN, "string")}
    known |= {name: TYPES[kind] for name, kind in all_keep.items()}
    faults: list[str] = []
    for number, step in enumerate(config.get("steps") or []):
        name, options = step_name(step), step_options(step)
        where, table = f"steps.{number}.{name}", ibis.table(known, name="rows")
        if name == "personal_data":
            faults += region_faults(options, where)
        if name == "template":
            faults += template_faults(options, list(known), where)
        looks = [partial(column, table, each, where) for each in _asked(name, options)]
        looks += [partial(condition, options["where"], table, where)] if name == "filter" else []
        for look in looks:
            try:
                look()
            except DataError as error:
                faults += error.faults
        known |= STEPS[name].adds
        if name == "near_duplicates" and options.get("action") == "mark":
            known["near_group"] = "int64"
    if faults:
        raise DataError(*faults, exit_code=2)


def _asked(name: str, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the columns that a step's options name."""
    for key in ("column", "by", "stratify"):
        if options.get(key):
            yield str(options[key])
    for key in ("columns", "group"):
        given = options.get(key) or []
        for each in [given] if isinstance(given, str) else given:
            if each != "near_duplicates":
                yield str(each)
    best = options.get("keep")
    if name in ("exact_duplicates", "near_duplicates", "cap") and best and best != "first":
        yield str(best).lstrip("-")
