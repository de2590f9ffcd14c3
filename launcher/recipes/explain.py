"""What a key of a recipe means, for `cookbook recipes --key`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from launcher.errors import UsageFault, nearest
from launcher.recipes.entries import ENTRIES, all_keys
from runspec.keys.key import REQUIRED, children, may_change


def key(name: str) -> dict[str, Any]:
    """Return what is known of a key, as JSON values; UsageFault with a hint if it is unknown."""
    known = all_keys()
    if name not in known:
        last = {each.rpartition(".")[2]: each for each in known}
        hint = nearest(name, known) or nearest(name, last)
        if name in last:
            hint = f" (did you mean {last[name]}?)"
        raise UsageFault(f"there is no key {name!r}{hint}: docs/keys.md lists all keys")
    found = known[name]
    return {
        "key": name,
        "type": found.expects,
        "default": "(required)" if found.default is REQUIRED else found.default,
        "help": found.help,
        "entries": [each for each, entry in ENTRIES.items() if name in entry.keys],
        "not_used": found.unused or None,
        "refused": found.refused or None,
        "may_change_at_resume": may_change(known, name),
        "keys": {inner: each.help for inner, each in children(known, name).items()},
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the same as text."""
    yield f"{found['key']}: {found['help']}"
    default = found["default"]
    shown = default if isinstance(default, str) else json.dumps(default)
    yield f"  type       {found['type']}"
    yield f"  default    {'none' if default is None else shown}"
    yield f"  entries    {', '.join(found['entries'])}"
    yield f"  at resume  {'may change' if found['may_change_at_resume'] else 'must be the same'}"
    if found["not_used"]:
        yield f"  not used   {found['not_used']}"
    if found["refused"]:
        yield f"  refused    {found['refused']}"
    if found["keys"]:
        yield "  keys"
        width = max(map(len, found["keys"]))
        for name, text in found["keys"].items():
            yield f"    {name:<{width}}  {text}"
