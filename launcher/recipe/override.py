"""Overrides of a recipe on the command line: key.path=value, +key.path=value and ~key.path."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from launcher import yamlfile
from launcher.errors import UsageFault, nearest_key
from launcher.recipe import absent
from launcher.recipe.entries import all_keys, inner_keys
from launcher.recipe.torchtune import KEYS, replace_older
from runspec import prepared
from runspec.keys.key import children

# In the recipe of a preparation of data, a number is a place in a list.
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")


def apply(config: dict[str, Any], overrides: Iterable[str]) -> list[str]:
    """Apply overrides to config in place and return their faults."""
    faults = []
    for text in overrides:
        try:
            _apply_one(config, text)
        except UsageFault as fault:
            faults += fault.faults
    return faults


def key_of(override: str) -> str:
    """Return the dotted key that an override sets or removes."""
    return override.lstrip("~+").partition("=")[0]


def value_of(override: str) -> Any:
    """Return the value that an override gives its key; UsageFault if it is no YAML."""
    return yamlfile.parse(override.partition("=")[2], f"the override {override!r}")


def is_override(word: str) -> bool:
    """Whether a word of the command line can only be an override."""
    return "=" in word or word.startswith(("~", "+"))


def parts_of(override: str) -> list[str]:
    """Return the parts of the dotted key of an override; UsageFault if it is none."""
    if not override.isprintable():
        raise UsageFault(
            f"the override {override!r} is more than one line of text: write key.path=value"
        )
    parts = key_of(override).split(".")
    if override.startswith("~") == ("=" in override) or not all(map(_PART.fullmatch, parts)):
        raise UsageFault(
            f"cannot read the override {override!r}: write key.path=value, +key.path=value for a "
            "new key, or ~key.path to remove one"
        )
    return parts


def _apply_one(config: dict[str, Any], text: str) -> None:
    removes, adds = text.startswith("~"), text.startswith("+")
    key, parts = key_of(text), parts_of(text)
    if key == "output_dir" and not removes:
        raise UsageFault(f"output_dir cannot be set: {all_keys()[key].unused}")
    parent = config
    for depth, part in enumerate(parts[:-1]):
        inner = parent.get(part)
        if inner is None and (adds or _is_known(config, parts[: depth + 1])):
            inner = parent[part] = {}
        if inner is None:
            raise _unknown(config, ".".join(parts[: depth + 1]), parent, text)
        if not isinstance(inner, dict):
            where = ".".join(parts[: depth + 1])
            raise UsageFault(f"{where} is {inner!r}, and has no keys: fix the override {text!r}")
        parent = inner
    leaf = parts[-1]
    if removes:
        if leaf not in parent:
            start = key.removesuffix(leaf)
            hint = nearest_key(leaf, [f"{start}{name}" for name in parent])
            raise UsageFault(f"the recipe has no key {key!r}{hint} to remove: leave out {text!r}")
        del parent[leaf]
        return
    if leaf not in parent and not adds and not _is_known(config, parts):
        raise _unknown(config, key, parent, text)
    value = value_of(text)
    if key in prepared.BLOCKS:
        value = prepared.expanded(value, parent.get(leaf) or config.get("dataset"))
    # A key of the table is checked with all others, when the whole recipe is known.
    expected = None if key in all_keys() else _changed_type(parent.get(leaf), value)
    if expected:
        found = text.partition("=")[2]
        raise UsageFault(
            f"{key} must be {expected}, as in the recipe ({parent[leaf]!r}); got {found!r}"
        )
    replace_older(config, key)
    parent[leaf] = value


def _is_known(config: Mapping[str, Any], parts: list[str]) -> bool:
    """Whether a key may be set although this recipe does not hold it."""
    dataset = config.get("dataset")
    if parts[0] == "dataset_val" and len(parts) == 2 and isinstance(dataset, dict):
        return parts[1] in dataset
    blocks, keys = config.get(parts[0]), inner_keys().get(parts[0])
    if keys and len(parts) == 3 and isinstance(blocks, dict) and parts[1] in blocks:
        return parts[2] in keys
    key = ".".join(parts)
    return key in KEYS or key in all_keys()


def _unknown(
    config: Mapping[str, Any], key: str, parent: Mapping[str, Any], text: str
) -> UsageFault:
    if why := absent.KEYS.get(key.partition(".")[0]):
        return UsageFault(f"the override {text!r}: {why}")
    block, dot, name = key.rpartition(".")
    hint = nearest_key(name, [f"{block}{dot}{n}" for n in [*parent, *children(all_keys(), block)]])
    # Its block may be what is missing.
    hint = hint or nearest_key(name, [*_paths(config), *all_keys()])
    message = f"unknown key {key!r}{hint} in the override {text!r}"
    if text.startswith("~"):
        return UsageFault(f"{message}: there is nothing to remove")
    return UsageFault(f"{message}: fix it; a key that is new to the recipe is added by +{text}")


def _paths(block: Mapping[str, Any], start: str = "") -> Iterator[str]:
    for name, value in block.items():
        yield f"{start}{name}"
        if isinstance(value, dict):
            yield from _paths(value, f"{start}{name}.")


def _changed_type(old: Any, new: Any) -> str | None:
    """Say what an override's value should have been, None if it fits the value it replaces."""
    if old is None or new is None:
        return None
    if isinstance(old, bool):
        return None if isinstance(new, bool) else "true or false"
    if isinstance(old, (int, float)):
        is_number = isinstance(new, (int, float)) and not isinstance(new, bool)
        return None if is_number else "a number"
    if isinstance(old, dict):
        return None if isinstance(new, dict) else "a mapping (override one of its keys)"
    return None
