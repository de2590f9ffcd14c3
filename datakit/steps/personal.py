"""Personal data and secrets: e-mail addresses, phone numbers, IBANs, cards, keys and tokens.

An IBAN and a card count only if their check digits are right (ISO 13616, ISO/IEC 7812).
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from datakit.rows import Rows, Work
from datakit.steps.filters import keep
from runspec.datarecipe import PERSONAL

_DEFAULTS = {"email": "mask", "phone": "mask", "iban": "mask", "card": "mask", "secret": "drop"}
# A pattern that texts without such data rarely meet, and which Arrow searches for in all rows.
_SUSPECT = r"@|\d[\d \-().]{6,}\d|[A-Z]{2}\d{2}|KEY-----"
_SUSPECT += r"|\b(?:sk|hf|gh[pousr]|xox|AKIA|ASIA|AIza|eyJ|glpat)"


def _luhn(text: str) -> bool:
    digits = [int(each) for each in text if each.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[-2::-2]]
    whole = sum(digits[-1::-2]) + sum(doubled)
    return 13 <= len(digits) <= 19 and len(set(digits)) > 1 and whole % 10 == 0


def _iban(text: str) -> bool:
    plain = text.replace(" ", "")
    turned = plain[4:] + plain[:4]
    number = "".join(str(int(each, 36)) for each in turned)
    return 15 <= len(plain) <= 34 and int(number) % 97 == 1


def _phone(text: str) -> bool:
    return 8 <= sum(each.isdigit() for each in text) <= 15


# In this order: a card's digits could be read as a phone number.
_FINDERS: dict[str, tuple[re.Pattern[str], Callable[[str], bool]]] = {
    "secret": (
        re.compile(
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
            r"|\b(?:hf_[A-Za-z0-9]{20,}|sk-(?:proj-|ant-)?[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}"
            r"|glpat-[\w-]{20,}|xox[abprs]-[\w-]{10,}|A[KS]IA[A-Z0-9]{16}|AIza[\w-]{35}"
            r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,})"
        ),
        lambda text: True,
    ),
    "email": (
        re.compile(r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9](?:[A-Za-z0-9.-]{0,250})\.[A-Za-z]{2,24}\b"),
        lambda text: True,
    ),
    "iban": (re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b"), _iban),
    "card": (re.compile(r"(?<![\d.])\d(?:[ -]?\d){12,18}(?!\d|\.\d)"), _luhn),
    "phone": (
        re.compile(
            # With a country's code, with an area's code in brackets or after 0, or as 555-123-4567.
            r"(?<![\w.])(?:\+\d{1,3}[ .-]?(?:\(?\d{1,4}\)?[ .-]?){2,5}\d{2,4}"
            r"|\(\d{2,4}\)[ .-]?\d{3,4}[ .-]?\d{3,4}|\d{3}[.-]\d{3}[.-]\d{4}|0\d{2,4}[ "
            r"/-]\d{5,8})(?![\w])"
        ),
        _phone,
    ),
}


def personal_data(rows: Rows, work: Work) -> Rows:
    """Mask personal data as [EMAIL] and so on, or drop its rows.

    email, phone, iban, card, secret: mask, drop or leave. Default: mask; a row with a secret drops.
    The record counts the rows in which each kind was found.
    """
    actions = {**_DEFAULTS, **{kind: str(how) for kind, how in work.options.items()}}
    made = work.map(rows, "masked", "datakit.steps.personal:mask", {"actions": actions})
    table = made.table
    counts = {
        kind: table["_personal"].contains(kind).cast("int64").sum().fill_null(0)
        for kind in PERSONAL
    }
    work.notes["rows_with"] = work.engine.one(table.agg(**counts))
    kept = keep(made, work, ~table["_dropped"])
    return kept.kept(kept.table.drop("_personal", "_dropped"), kept.count)


# Arrow function ------------------------------------------------------------------------------


def mask(table: Any, actions: Mapping[str, str]) -> Any:
    """Return the rows with masked texts, and _personal (kinds that were found) and _dropped."""
    import pyarrow as pa
    import pyarrow.compute as pc

    names = ("prompt", "answer", "messages", "rejected")
    columns = {name: table[name].to_pylist() for name in names}
    suspect = None
    for name in names:
        found = pc.fill_null(
            pc.match_substring_regex(table[name].cast(pa.string()), _SUSPECT), False
        )
        suspect = found if suspect is None else pc.or_(suspect, found)
    kinds, dropped = [""] * len(table), [False] * len(table)
    for index in (i for i, is_one in enumerate(suspect.to_pylist()) if is_one):
        seen: set[str] = set()
        for name in names:
            value = columns[name][index]
            if value is not None:
                change = _mask_messages if name == "messages" else _mask_text
                columns[name][index] = change(value, actions, seen)
        kinds[index] = ",".join(sorted(seen))
        dropped[index] = any(actions[kind] == "drop" for kind in seen)
    made = table
    for name in names:
        place = made.column_names.index(name)
        made = made.set_column(place, name, pa.array(columns[name], pa.string()))
    made = made.append_column("_personal", pa.array(kinds, pa.string()))
    return made.append_column("_dropped", pa.array(dropped, pa.bool_()))


def _mask_text(text: str, actions: Mapping[str, str], seen: set[str]) -> str:
    for kind, (pattern, is_one) in _FINDERS.items():
        if actions[kind] == "leave":
            continue

        def replaced(found: re.Match[str], kind: str = kind, is_one: Any = is_one) -> str:
            if not is_one(found.group()):
                return found.group()
            seen.add(kind)
            return f"[{kind.upper()}]"

        text = pattern.sub(replaced, text)
    return text


def _mask_messages(text: str, actions: Mapping[str, str], seen: set[str]) -> str:
    # Message by message: in JSON text an escape could be taken for a part of a word.
    from datakit.formats import encode

    turns = json.loads(text)
    return encode(
        [{**turn, "content": _mask_text(turn["content"], actions, seen)} for turn in turns]
    )
