"""A key of a recipe: what it may hold, its default and its help; and the check of given values."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, NamedTuple

from runspec.hints import nearest

REQUIRED = object()
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
NAME_RULE = "letters, digits, '.', '_' and '-', beginning with a letter or digit, 64 at most"
Test = Callable[[Any], bool]


def _whole(lowest: int) -> Test:
    return lambda value: type(value) is int and value >= lowest


def _number(lowest: float) -> Test:
    return lambda value: type(value) in (int, float) and lowest <= value < math.inf


def _is_line(value: Any) -> bool:
    return isinstance(value, str) and value != "" and value.isprintable()


def _list(item: Test) -> Test:
    return lambda value: isinstance(value, list) and all(map(item, value))


def _is_component(value: Any) -> bool:
    return isinstance(value, dict) and _is_line(value.get("_component_"))


def _text(pattern: str) -> Test:
    return lambda value: type(value) in (str, int) and bool(re.fullmatch(pattern, str(value)))


def _is(kind: type) -> Test:
    return lambda value: isinstance(value, kind)


_is_name = _text(NAME.pattern)
_BLOCK = "a block of 'key: value' lines"


class Kind(NamedTuple):
    """What a value must be, in words, and the test of it."""

    description: str
    test: Test


# By the name that a table of keys gives.
KINDS = {
    "any": Kind("anything", lambda value: True),
    "flag": Kind("true or false", _is(bool)),
    "count": Kind("a whole number, 0 or more", _whole(0)),
    "positive": Kind("a whole number, 1 or more", _whole(1)),
    "dimension": Kind("a whole number, 1 or more, or -1", lambda v: v == -1 or _whole(1)(v)),
    "number": Kind("a number above 0", _number(math.ulp(0))),
    "rate": Kind("a number, 0 or more", _number(0)),
    "share": Kind("a number above 0, 1 at most", lambda v: _number(math.ulp(0))(v) and v <= 1),
    "text": Kind("one line of text", _is_line),
    "fp32": Kind("fp32", lambda value: value == "fp32"),
    "list": Kind("a list", _is(list)),
    "texts": Kind("a list of strings", _list(_is_line)),
    "ranks": Kind(
        "all, or a list of ranks such as [0, 8]",
        lambda value: value == "all" or (value != [] and _list(_whole(0))(value)),
    ),
    "layers": Kind(
        "none, full, op, or a number n for every n-th layer",
        lambda value: value in ("none", "full", "op") or _whole(1)(value),
    ),
    "block": Kind(_BLOCK, _is(dict)),
    "named block": Kind(f"a name, or {_BLOCK}", lambda v: isinstance(v, dict) or _is_name(v)),
    # These two may hold keys that no table lists.
    "open block": Kind(_BLOCK, _is(dict)),
    "component": Kind("a block with a _component_", _is_component),
    "name": Kind(NAME_RULE, _is_name),
    # sbatch --test-only checks it before the job is queued.
    "word": Kind(
        "one word, as sbatch takes it", _text(r"[A-Za-z0-9_(\[][A-Za-z0-9_.,:@+&|*()\[\]-]*")
    ),
    "memory": Kind("a size such as 900G, or 0 for all of a node's memory", _text(r"\d+[KMGT]?")),
    "time": Kind(
        "a limit such as 04:00:00, 90 (minutes) or 2-00:00:00, above 0",
        _text(r"(?=.*[1-9])(?:\d+|\d+:[0-5]?\d|\d+:[0-5]?\d:[0-5]?\d|\d+-\d+(?::[0-5]?\d){0,2})"),
    ),
    # A repository of the hub, and a branch, tag or commit after an @.
    "repository": Kind(
        "a Hub repository such as org/name or org/name@revision",
        _text(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?:@[A-Za-z0-9][\w./-]*)?"),
    ),
    "tracker": Kind(
        "mlflow, or an MLflow server's http(s) address",
        _text(r"mlflow|https?://\S+|sqlite:///\S+"),
    ),
    "interface": Kind(
        "a network interface such as ib0", _text(r"[A-Za-z0-9=^][A-Za-z0-9_.,=^-]{0,63}")
    ),
}


@dataclass(frozen=True)
class Key:
    """One key of a recipe; a dotted name is a key inside a block."""

    name: str
    # A name in KINDS, or all the values that are possible, as "best | last".
    kind: str
    help: str
    # REQUIRED if there is none. A value of null is the same as no value.
    default: Any = None
    # Whether it may be null; False for an argument that a component is given as it is.
    nullable: bool = True
    # Not empty if the key is accepted, because torchtune's configs hold it, and changes nothing:
    # what happens instead.
    unused: str = ""
    # Not empty if no value but null and false is accepted: what to do instead.
    refused: str = ""
    # Whether a run may resume with another value.
    may_change: bool = False

    @property
    def choices(self) -> list[str]:
        """All values that are possible, [] if its kind says it."""
        return self.kind.split(" | ") if " | " in self.kind else []

    @property
    def expects(self) -> str:
        """What a value must be, in words."""
        return f"one of {', '.join(self.choices)}" if self.choices else KINDS[self.kind].description

    @property
    def is_open(self) -> bool:
        """Whether it is a block that may hold keys which no table lists."""
        return self.kind in ("component", "open block")

    def fault(self, value: Any) -> str | None:
        """Return what is wrong with a value, None if nothing is."""
        if isinstance(value, str) and "${" in value:
            return None  # a reference is checked when it has its value
        if value is None:
            remedy = f"set it, or remove it (an override: ~{self.name})"
            needed = f"{self.name} must be {self.expects}, got null: {remedy}"
            return None if self.nullable else needed
        if not (value in self.choices if self.choices else KINDS[self.kind].test(value)):
            hint = nearest(str(value), self.choices)
            return f"{self.name} must be {self.expects}, got {value!r}{hint}"
        return f"{self.name} is refused: {self.refused}" if self.refused and value else None


Keys = Mapping[str, Key]


def table(*keys: Key) -> dict[str, Key]:
    """Return keys by their names."""
    return {key.name: key for key in keys}


class Fault(NamedTuple):
    """A fault of a recipe: the dotted name of the key, and what is wrong, without its place."""

    key: str
    text: str


def children(keys: Keys, block: str = "") -> dict[str, Key]:
    """Return the keys of a block by their own names; "" stands for the recipe itself."""
    split = ((*name.rpartition("."), key) for name, key in keys.items())
    return {last: key for before, _, last, key in split if before == block}


def faults(values: Mapping[Any, Any], keys: Keys, block: str = "") -> Iterator[Fault]:
    """Yield all faults of a block's values: unknown, missing, refused, or not of their kind."""
    known = children(keys, block)
    start = f"{block}." if block else ""
    for name, value in values.items():
        key = known.get(name)
        text = key.fault(value) if key else None
        if text:
            yield Fault(f"{start}{name}", text)
        elif key and isinstance(value, dict) and (key.is_open or children(keys, key.name)):
            yield from faults(value, keys, key.name)
        elif key is None and value is not None and not (block and keys[block].is_open):
            hint = nearest(str(name), known)
            yield Fault(f"{start}{name}", f"unknown key '{start}{name}'{hint}")
    for name, key in known.items():
        if key.default is REQUIRED and values.get(name) is None:
            what = "" if key.kind == "any" else f": it must be {key.expects}"
            yield Fault(key.name, f"{key.name} is missing{what}")


def unused(values: Mapping[str, Any], keys: Keys, block: str = "") -> Iterator[Key]:
    """Yield the keys that are given, would change something, and are not used."""
    for name, key in children(keys, block).items():
        value = values.get(name)
        if key.unused and value:
            yield key
        elif isinstance(value, dict):
            yield from unused(value, keys, key.name)


def may_change(keys: Keys, name: str) -> bool:
    """Whether a run may resume with another value of a key, such as optimizer.lr.

    A key is as the table says of it, or of a block around it; one that is not used may be anything.
    """
    around = (key for each, key in keys.items() if f"{name}.".startswith(f"{each}."))
    return any(key.may_change or key.unused for key in around)


# Keys as the fields of a class --------------------------------------------------------------------


def setting(
    kind: str, help: str, default: Any = None, inner: Iterable[Key] = (), **more: Any
) -> Any:
    """Return a field of a config's class that is a key of a recipe.

    inner: the keys of its block, by their own names. more: the other fields of Key.
    """
    return field(metadata={"key": Key("", kind, help, default, **more), "inner": tuple(inner)})


def changeable(
    kind: str, help: str, default: Any = None, inner: Iterable[Key] = (), **more: Any
) -> Any:
    """As `setting`, of a key with which a run may resume with another value."""
    return setting(kind, help, default, inner, may_change=True, **more)


def option(kind: str, help: str, default: Any = None) -> Any:
    """Return a field that is a key, and whose value is the key's default if none is given.

    Without one, texts and a block are empty.
    """
    empty = {"texts": tuple, "open block": dict}.get(kind, lambda: default)
    return field(default_factory=empty, metadata={"key": Key("", kind, help, default), "inner": ()})


def keys_of(config: type) -> dict[str, Key]:
    """Return the keys that the fields of a config's class are, and those in its `ignored`."""
    keys = [key for each in fields(config) if "key" in each.metadata for key in _keys_of(each)]
    return table(*keys, *getattr(config, "ignored", ()))


def _keys_of(of: Field[Any]) -> Iterator[Key]:
    yield replace(of.metadata["key"], name=of.name)
    for each in of.metadata["inner"]:
        yield replace(each, name=f"{of.name}.{each.name}")
