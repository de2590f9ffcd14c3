"""What a table of another trainer's keys may hold, and the recipe that is made by it.

A row is the recipe's key of the same meaning; or Unused or Refused, with the reason; or a function
that puts the value into the recipe, or returns one of these two.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from launcher.errors import UsageFault, nearest
from launcher.recipes import own
from launcher.recipes.launch import at

_PERCENT = re.compile(r"([\w.]+)\[(\d*)%?:(\d*)%?\]")


class Unused(NamedTuple):
    """A key that changes nothing here; the reason says what happens instead."""

    reason: str


class Refused(NamedTuple):
    """A key whose meaning the kit does not have, or not here; the reason ends with the way on."""

    reason: str


Answer = str | Unused | Refused | None
Rule = Callable[["Draft", Any], Answer]
Row = str | Unused | Refused | Rule
Table = Mapping[str, Row]


class Line(NamedTuple):
    """One key of the file: taken, unused, refused, unknown or left out, and why or as what.

    default: the file does not have the key; its trainer's default is meant.
    """

    key: str
    state: str
    note: str
    default: bool = False


@dataclass(frozen=True)
class Peer:
    """Another trainer's configs.

    prefix: its row in the tables of entries and engines. defaults: what it does if a file does not
    hold a key, where the kit's recipes do something else. begin: decides entry and method. data,
    model: the keys that --data and MODEL replace. method: the names that --entry takes.
    """

    name: str
    prefix: str
    table: Table
    begin: Callable[["Draft"], None]
    data: frozenset[str]
    model: frozenset[str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    end: Callable[["Draft"], None] = lambda draft: None


@dataclass
class Draft:
    """The recipe that a config becomes.

    given: the config. defaults: of its trainer, by dotted path. wanted: the entry that the user
    names. method: full, lora or qlora. model: as the config names it. values: the recipe's keys by
    dotted path; origin: of which key. folder: of the config.
    """

    given: Mapping[str, Any]
    defaults: dict[str, Any]
    nodes: int = 0
    gpus_per_node: int = 0
    wanted: str = ""
    data: str = ""
    entry: str = "sft"
    method: str = "full"
    model: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    key: str = ""
    folder: str = "."

    def needs(self, ranks: int, nodes: int = 0) -> None:
        """Set the number of GPUs, where the user does not."""
        nodes = self.nodes or nodes or -(-ranks // 8)
        self.nodes, self.gpus_per_node = nodes, self.gpus_per_node or -(-ranks // nodes)

    @property
    def ranks(self) -> int:
        """The number of GPUs."""
        return self.nodes * self.gpus_per_node

    def get(self, path: str) -> Any:
        """The config's value at a dotted path, or its trainer's default; None if there is none."""
        value = at(self.given, path)
        return self.defaults.get(path) if value is None else value

    def put(self, path: str, value: Any) -> None:
        """Set a key of the recipe."""
        self.values[path] = value
        self.origin[path] = self.key

    def accumulate(self, total: int, micro: int, ranks: int, gpus: str) -> Answer:
        """Reach so many samples per step by micro-steps of `micro` on each of the ranks.

        gpus: what the ranks are, in the answer.
        """
        steps, rest = divmod(total, int(micro) * ranks)
        if rest or not steps:
            return Refused(
                f"{total} samples per step are no multiple of {micro} on each of {ranks} {gpus}: "
                "give --gpus-per-node and --nodes for which they are"
            )
        self.put("gradient_accumulation_steps", steps)
        return f"{total} samples per step on {ranks} {gpus}"

    def held_out(self, size: float) -> Answer:
        """Validate on a share, or a number, of the training samples, the last ones."""
        block = self.values.get("dataset")
        if not size:
            return Unused("nothing is held out")
        if not isinstance(block, dict) or "split" not in block:
            return Refused("a part can be held out of a dataset only: set dataset_val")
        *others, split = str(block["split"]).split("+")
        name, first, last = split, 0, 100
        if match := _PERCENT.fullmatch(split):
            name, first, last = match[1], int(match[2] or 0), int(match[3] or 100)
        elif "[" in split:
            return Refused(f"no part of {split} can be held out: set dataset_val.split")
        if size < 1:
            middle = last - max(1, round(size * (last - first)))
            begin = "" if first == 0 else f"{first}%"
            end = "" if last == 100 else f"{last}%"
            own, kept = f"{name}[{begin}:{middle}%]", f"{name}[{middle}%:{end}]"
        elif name == split:
            own, kept = f"{name}[:-{int(size)}]", f"{name}[-{int(size)}:]"
        else:
            return Refused(f"no number of samples of {split} can be held out: set a share")
        block["split"] = "+".join([*others, own])
        self.put("dataset_val", {"split": kept})
        return "the last samples, where its trainer draws them at random"


def convert(peer: Peer, draft: Draft, replaced: Table) -> None:
    """Fill a draft by a trainer's table: a line for each key of the file, and for each default.

    replaced: rows that take the place of the table's, for keys that the user gave in another way.
    """
    table = {**peer.table, **replaced}
    peer.begin(draft)
    draft.needs(1)
    if draft.data:
        _use_data(draft)
    leaves = dict(_leaves(draft.given, table))
    # Other keys depend on the model and the data, and files have any order.
    first = [*(peer.model & leaves.keys()), *(key for key in leaves if key in peer.data), *leaves]
    lines = {key: _line(draft, table, key, leaves[key]) for key in dict.fromkeys(first)}
    draft.lines += [lines[key] for key in leaves]
    for key, value in draft.defaults.items():
        if leaves.get(key) is None:
            line = _line(draft, table, key, value)
            draft.lines += [line._replace(default=True)] if line.state != "unused" else []
    draft.key = ""
    peer.end(draft)


def _use_data(draft: Draft) -> None:
    config = {"entry": draft.entry, "dataset": {}}
    choices, faults = own.use(config, (), draft.data, None, draft.method)
    if faults:
        raise UsageFault(faults)
    draft.key = "--data"
    draft.put("dataset", config["dataset"])
    draft.put("hub.dataset", None)
    draft.lines.append(Line("--data", "taken", choices.notes[0]))


def _leaves(block: Mapping[str, Any], table: Table, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of a config; a block's own, if the table has rows for these."""
    for name, value in block.items():
        key = f"{above}{name}"
        inside = any(row.startswith(f"{key}.") for row in table)
        if isinstance(value, Mapping) and value and inside:
            yield from _leaves(value, table, f"{key}.")
        else:
            yield key, value


def _line(draft: Draft, table: Table, key: str, value: Any) -> Line:
    row = table.get(key)
    if row is None:
        return Line(key, "unknown", f"unknown key{nearest(key, table)}")
    if value is None:
        return Line(key, "unused", "it has no value")
    draft.key = key
    if isinstance(row, str):
        draft.put(row, value)
        answer: Answer = ""
    else:
        answer = row if isinstance(row, Unused | Refused) else row(draft, value)
    if isinstance(answer, Unused | Refused):
        return Line(key, "unused" if isinstance(answer, Unused) else "refused", answer.reason)
    put = [path for path, of in draft.origin.items() if of == key]
    made = ", ".join(f"{path}={shown(draft.values[path])}" for path in put)
    return Line(key, "taken", "; ".join(filter(None, (made, answer))))


def shown(value: Any) -> str:
    """A value as a line of the table shows it."""
    if isinstance(value, dict) and "source" in value:
        reader = str(value.get("_component_")).rpartition(".")[2]
        place = value.get("data_files") or value["source"]
        return f"{reader} of {shown(place)}, split {value.get('split')}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {shown(each)}" for key, each in value.items()) + "}"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."


# What rows of several tables are made of ----------------------------------------------------------


def names(text: str) -> frozenset[str]:
    """The words of a text, as a set."""
    return frozenset(text.split())


def without(content: Mapping[str, Any], path: str) -> dict[str, Any] | None:
    """Return a config without a dotted key; None if it has no such key."""
    name, dot, rest = path.partition(".")
    if path in content:
        return {key: value for key, value in content.items() if key != path}
    inner = content.get(name)
    if not dot or not isinstance(inner, Mapping) or (kept := without(inner, rest)) is None:
        return None
    return {**content, name: kept}


def rows(row: Row, names: str) -> dict[str, Row]:
    """The same row for several keys."""
    return dict.fromkeys(names.split(), row)


def off(reason: str, *values: Any) -> Rule:
    """A key that must be switched off, or have one of these values."""

    def row(_: Draft, value: Any) -> Answer:
        if value in (False, 0, "", "none", *values) or value in ([], {}):
            return Unused("it is switched off, or as here")
        return Refused(reason)

    return row


def only_for(entries: str, path: str) -> Row:
    """A key of some methods; TRL's names of options are the same for others."""

    def row(draft: Draft, value: Any) -> Answer:
        if draft.entry not in entries.split():
            return Unused(f"the method is {draft.entry}, which has no such key")
        draft.put(path, value)
        return None

    return row


def switch(path: str) -> Row:
    """A flag that is the recipe's key too; switched off it says nothing."""

    def row(draft: Draft, value: Any) -> Answer:
        if not value:
            return Unused("it is switched off")
        draft.put(path, True)
        return None

    return row


def whole(path: str) -> Rule:
    """A number of steps, epochs or checkpoints; 0 and -1 stand for none."""

    def row(draft: Draft, value: Any) -> Answer:
        if isinstance(value, float) and not value.is_integer():
            return Refused(f"{value} is no whole number: set {path} to one, or max_steps")
        if not isinstance(value, int | float) or value < 1:
            return Unused("it sets no limit")
        draft.put(path, int(value))
        return None

    return row
