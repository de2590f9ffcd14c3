"""The step that masks personal data, or removes the rows with it."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from plugins.data.datarecipe import PERSONAL
from plugins.data.recognisers import REGIONS, SUSPECT, find, replaced
from plugins.data.rows import Rows, Work
from plugins.data.steps.filters import keep

_DEFAULTS = {"email": "mask", "phone": "mask", "iban": "mask", "card": "mask", "secret": "drop"}


def personal_data(rows: Rows, work: Work) -> Rows:
    """Mask personal data as [EMAIL] and so on, or remove its rows.

    email, phone, iban, card, secret: mask, drop or leave. Default: mask, and drop for secrets.
    regions: countries whose phone numbers count without a country code. The record has the number
    of rows with each kind.
    """
    given = {kind: str(how) for kind, how in work.options.items() if kind in PERSONAL}
    options = {
        "actions": {**_DEFAULTS, **given},
        "regions": list(work.options.get("regions") or REGIONS),
    }
    made = work.map(rows, "masked", "plugins.data.steps.personal:mask", options)
    table = made.table
    counts = {
        kind: table["_personal"].contains(kind).cast("int64").sum().fill_null(0)
        for kind in PERSONAL
    }
    work.notes["rows_with"] = work.engine.one(table.agg(**counts))
    kept = keep(made, work, ~table["_dropped"])
    return kept.kept(kept.table.drop("_personal", "_dropped"), kept.count)


def region_faults(options: Mapping[str, Any], where: str) -> list[str]:
    """Return the faults of unknown countries."""
    from phonenumbers import SUPPORTED_REGIONS

    return [
        f"{where}.regions: {name!r} is not a country: write ISO 3166 codes such as DE, US"
        for name in options.get("regions") or []
        if name not in SUPPORTED_REGIONS
    ]


# Arrow function ------------------------------------------------------------------------------


def mask(table: Any, actions: Mapping[str, str], regions: Sequence[str]) -> Any:
    """Return the rows with masked texts, and _personal (kinds that were found) and _dropped."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    whole = "|".join(SUSPECT.values())
    made = table
    seen: list[set[str]] = [set() for _ in range(len(table))]
    for name in ("prompt", "answer", "messages", "rejected"):
        column = table[name].cast(pa.string()).combine_chunks()
        suspect = pc.fill_null(pc.match_substring_regex(column, whole), False)
        # Only suspect texts become Python objects.
        few = column.filter(suspect)
        may = {
            kind: pc.match_substring_regex(few, pattern).to_pylist()
            for kind, pattern in SUSPECT.items()
        }
        change = _masked_messages if name == "messages" else _masked
        values = [
            change(text, actions, regions, {kind for kind in may if may[kind][place]}, seen[row])
            for place, (row, text) in enumerate(
                zip(np.flatnonzero(suspect).tolist(), few.to_pylist(), strict=True)
            )
        ]
        column = pc.replace_with_mask(column, suspect, pa.array(values, pa.string()))
        made = made.set_column(made.column_names.index(name), name, column)
    kinds = [",".join(sorted(each)) for each in seen]
    dropped = [any(actions[kind] == "drop" for kind in each) for each in seen]
    made = made.append_column("_personal", pa.array(kinds, pa.string()))
    return made.append_column("_dropped", pa.array(dropped, pa.bool_()))


def _masked(
    text: str,
    actions: Mapping[str, str],
    regions: Sequence[str],
    kinds: Collection[str],
    seen: set[str],
) -> str:
    # Kinds with the action leave are found too, so that no part of them is masked as another kind.
    findings = [each for each in find(text, regions, kinds) if actions[each[2]] != "leave"]
    seen.update(kind for _, _, kind in findings)
    return replaced(text, findings, lambda kind, value: f"[{kind.upper()}]")


def _masked_messages(text: str, *how: Any) -> str:
    # Message by message: in JSON an escape could be read as a part of a word.
    from plugins.data.formats import encode

    turns = json.loads(text)
    return encode([{**turn, "content": _masked(turn["content"], *how)} for turn in turns])
