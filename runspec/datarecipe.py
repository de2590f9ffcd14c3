"""A data recipe: sources, steps and outputs; its keys and the check of what is given."""

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime
from pathlib import Path
from typing import Any

from runspec.hints import nearest

FORMATS: dict[str, dict[str, str]] = {
    # Columns of each format, by the name that the kit gives them.
    "alpaca": {"instruction": "instruction", "input": "input", "output": "output"},
    "sharegpt": {"conversations": "conversations"},
    "messages": {"messages": "messages", "answer": ""},
    "qa": {"question": "question", "answer": "answer"},
    "text": {"text": "text"},
    "preference": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
}
TYPES = ("json", "jsonl", "csv", "parquet", "hub", "sql", "delta", "iceberg")
SUFFIXES = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
PACKED = (".gz", ".bz2", ".xz", ".zst")
# What the rows of a set can be.
SHAPES = ("messages", "text", "preference")
KINDS = ("text", "number", "whole", "flag")
ENGINES = ("auto", "duckdb", "spark")
PERSONAL = ("email", "phone", "iban", "card", "secret")

OWN_COLUMNS = ("id", "_id", "source", "prompt", "answer", "messages", "rejected", "text", "split")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_whole(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_time(value: Any) -> bool:
    try:
        return isinstance(datetime.fromisoformat(value) if isinstance(value, str) else value, date)
    except ValueError:
        return False


def _is_encoding(value: Any) -> bool:
    try:
        return bool("a".encode(str(value)))
    except (LookupError, UnicodeError):
        return False


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


# What a value may be: how it is tested, and how a message says it. Others: one of a tuple, or None.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "whole": (_is_whole, "a whole number, 1 or more"),
    "count": (lambda value: value == 0 or _is_whole(value), "a whole number, 0 or more"),
    "number": (_is_number, "a number"),
    "share": (lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
    "similarity": (
        lambda value: _is_number(value) and 0 < value <= 1,
        "a number above 0 and at most 1",
    ),
    "size": (lambda value: memory_bytes(value) is not None, "a size such as 2G or 500M"),
    "time": (_is_time, "a time such as 2026-01-31T12:00:00Z"),
    "encoding": (_is_encoding, "one that Python supports, such as utf-8"),
    "column": (lambda value: re.fullmatch(r"[A-Za-z_]\w*", str(value)) is not None, "a column"),
    "countries": (_is_list, "a list of countries such as [DE, US]"),
    "names": (lambda value: isinstance(value, dict), "a block such as {question: request}"),
    "kinds": (lambda value: isinstance(value, dict), "a block such as {quality: number}"),
    "shares": (
        lambda value: isinstance(value, dict) and bool(value),
        "a block of names and shares, such as {train: 0.8, test: 0.2}",
    ),
}
_Known = Mapping[str, str | tuple[str, ...] | None]
TOP: _Known = {
    **dict.fromkeys(("description", "temp_dir", "sources", "steps", "output", "resources", "seed")),
    "engine": ENGINES,
    "memory": "size",
    "threads": "whole",
    "max_bad_share": "share",
}
SOURCE: _Known = {
    **dict.fromkeys(("name", "path", "repository", "split", "url", "query")),
    "type": TYPES,
    "format": tuple(FORMATS),
    "columns": "names",
    "keep": "kinds",
    "partition_by": "column",
    "partitions": "whole",
    "version": "count",
    "timestamp": "time",
    "encoding": "encoding",
    "max_rows": "whole",
}
# Keys that only some types of sources use.
_ONLY: dict[str, tuple[str | None, ...]] = {
    # None: a folder or a pattern, whose files have types of their own.
    "encoding": ("json", "jsonl", "csv", None),
    "query": ("sql",),
    "partition_by": ("sql",),
    "partitions": ("sql",),
    "split": ("hub",),
    "version": ("delta", "iceberg"),
    "timestamp": ("delta", "iceberg"),
}
_OUTPUT: _Known = {"format": (*SHAPES, "delta"), "rows": SHAPES}
# The options of each step; the first one is what a bare value means.
STEPS: dict[str, _Known] = {
    "filter": {"where": None},
    "length": {"max": "number", "min": "number", "column": None},
    "language": {"keep": None, "column": None},
    "quality": {"min": "number", "column": None},
    "exact_duplicates": {"columns": None, "keep": None, "normalise": None},
    "near_duplicates": {
        "jaccard": "similarity",
        **dict.fromkeys(("ngram", "bands", "rows_per_band"), "whole"),
        "keep": None,
        "action": ("remove", "mark"),
        "column": None,
    },
    "decontaminate": {"against": None, "ngram": "whole", "min_hits": "whole"},
    "personal_data": {
        **dict.fromkeys(PERSONAL, ("mask", "drop", "leave")),
        "regions": "countries",
    },
    "template": {"prompt": None, "answer": None, "system": None},
    "tokens": {"max": "number", "min": "number", "tokenizer": None},
    "mixture": {"weights": "shares", "rows": "whole"},
    "cap": {"rows": "whole", "by": None, "keep": None},
    "split": {"shares": "shares", "stratify": None, "group": None, "like": None},
}
_REQUIRED = {
    "filter": ("where",),
    "language": ("keep",),
    "decontaminate": ("against",),
    "tokens": ("tokenizer",),
    "mixture": ("weights",),
    "cap": ("rows", "by"),
    "split": ("shares",),
}


def faults(config: Mapping[str, Any]) -> list[str]:
    """Return all faults of a data recipe, one line each."""
    texts = list(_faults(config, TOP, ""))
    sources = config.get("sources")
    if not isinstance(sources, list) or not sources:
        texts.append("sources is missing: it must be a list of sources, each with path and format")
    else:
        for number, source in enumerate(sources):
            texts += _source_faults(source, f"sources.{number}")
        names = [source_name(each, n) for n, each in enumerate(sources) if isinstance(each, dict)]
        for name in sorted({name for name in names if names.count(name) > 1}):
            texts.append(f"sources: two have the name {name!r}: give each its own name")
    listed = config.get("steps") or []
    if not isinstance(listed, list):
        return [*texts, "steps must be a list, one step each: - filter: quality >= 0.85"]
    for number, step in enumerate(listed):
        texts += _step_faults(step, f"steps.{number}")
    kinds = [step_name(step) for step in listed if _is_step(step)]
    if "split" in kinds[:-1]:
        texts.append("steps: split must be the last step, and the only split")
    output = config.get("output") or {}
    if not isinstance(output, dict):
        return [*texts, "output must be a block, such as {format: messages}"]
    texts += _faults(output, _OUTPUT, "output.")
    if output.get("rows") is not None and output.get("format") != "delta":
        texts.append("output.rows is used only with output.format=delta: leave it out")
    return texts


def _faults(given: Mapping[str, Any], known: _Known, start: str) -> Iterator[str]:
    """Yield the keys that are not known, and the values that are not what their keys take."""
    for name, value in given.items():
        kind = known.get(name)
        if name not in known:
            yield f"unknown key '{start}{name}'{nearest(str(name), known)}"
        elif kind is None or value is None:
            continue
        elif isinstance(kind, tuple):
            if value not in kind:
                hint = nearest(str(value), kind)
                yield f"{start}{name} must be one of {', '.join(kind)}{hint}, got {value!r}"
        elif not _RULES[kind][0](value):
            yield f"{start}{name} must be {_RULES[kind][1]}, got {value!r}"


def _source_faults(source: Any, where: str) -> Iterator[str]:
    if not isinstance(source, dict):
        yield f"{where} must be a block with path and format, got {source!r}"
        return
    yield from _faults(source, SOURCE, f"{where}.")
    places = [key for key in ("path", "repository", "url") if source.get(key)]
    if len(places) != 1:
        got = ", ".join(places) or "none"
        yield f"{where} must have one of path, repository and url, got {got}"
    if source.get("url") and not source.get("query"):
        yield f"{where}.query is missing: the SELECT statement whose rows are read"
    form, columns, keep = (source.get(key) for key in ("format", "columns", "keep"))
    if form is None:
        yield f"{where}.format is missing: one of {', '.join(FORMATS)}"
    elif str(form) in FORMATS and isinstance(columns, dict):
        yield from _faults(columns, dict.fromkeys(FORMATS[str(form)]), f"{where}.columns.")
    kind = source_type(source)
    for key, kinds in _ONLY.items():
        if source.get(key) is not None and kind not in kinds:
            names = " or ".join(filter(None, kinds))
            yield f"{where}.{key} is used only for the type {names}: leave it out"
    if source.get("partitions") and not source.get("partition_by"):
        yield f"{where}.partitions needs partition_by: the column whose ranges are read"
    if source.get("timestamp") is not None and source.get("version") is not None:
        yield f"{where} must have version or timestamp, not both"
    if isinstance(keep, dict):
        yield from _faults(keep, dict.fromkeys(keep, KINDS), f"{where}.keep.")
        for column in keep.keys() & set(OWN_COLUMNS):
            yield f"{where}.keep.{column}: the kit uses a column of that name itself"


def _step_faults(step: Any, where: str) -> Iterator[str]:
    if not _is_step(step):
        yield f"{where} must be one step such as 'filter: quality >= 0.85', got {step!r}"
        return
    name = step_name(step)
    if name not in STEPS:
        hint = nearest(str(name), STEPS)
        yield f"{where}: there is no step {name!r}{hint}; steps: {', '.join(STEPS)}"
        return
    options = step_options(step)
    yield from _faults(options, STEPS[name], f"{where}.{name}.")
    for needed in _REQUIRED.get(name, ()):
        if options.get(needed) in (None, [], {}):
            yield f"{where}.{name}.{needed} is missing"
    for key, kind in STEPS[name].items():
        if kind == "shares" and isinstance(options.get(key), dict):
            yield from _share_faults(name, options[key], f"{where}.{name}")
    low, high = options.get("min"), options.get("max")
    if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
        yield f"{where}.{name}: min {low} is above max {high}, so that no row is kept"


def _share_faults(name: str, shares: Mapping[Any, Any], where: str) -> Iterator[str]:
    for key, value in shares.items():
        if not _is_number(value) or value <= 0:
            yield f"{where}.{key} must be a number above 0, got {value!r}"
            return
        if name == "split" and not str(key).isidentifier():
            yield f"{where}: {key!r} is not a valid split name: use letters, digits and _"
    if name == "split" and abs(sum(shares.values()) - 1) > 1e-6:
        total = " + ".join(f"{value:g}" for value in shares.values())
        yield f"{where}: the shares must add up to 1; {total} = {sum(shares.values()):g}"


def _is_step(step: Any) -> bool:
    return isinstance(step, str) or (isinstance(step, dict) and len(step) == 1)


def step_name(step: str | Mapping[str, Any]) -> str:
    """Return the kind of a step; one without options is just its name."""
    return step if isinstance(step, str) else str(next(iter(step)))


def step_options(step: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return a step's options; a bare value is that of its first option."""
    name = step_name(step)
    value = None if isinstance(step, str) else step[name]
    known = STEPS[name]
    first = next(iter(known))
    # A mapping of names and shares as a whole is the first option, not the options.
    if isinstance(value, dict) and not (known[first] == "shares" and not set(value) & set(known)):
        return dict(value)
    return {} if value is None or value is True else {first: value}


def source_name(source: Mapping[str, Any], number: int) -> str:
    """Return the name of a source: the given one, else that of its file or dataset."""
    given = source.get("name") or source.get("path") or source.get("repository")
    text = str(given or f"source{number}")
    return text if source.get("name") else Path(text.rstrip("/")).name.split(".")[0] or text


def source_type(source: Mapping[str, Any], path: Path | None = None) -> str | None:
    """Return the type of a source, or of one of its files; None if nothing says it."""
    if source.get("type"):
        return str(source["type"])
    if source.get("repository"):
        return "hub"
    if source.get("url"):
        return "sql"
    suffixes = [each for each in (path or Path(str(source.get("path")))).suffixes]
    if suffixes and suffixes[-1] in PACKED:
        suffixes.pop()
    return SUFFIXES.get(suffixes[-1]) if suffixes else None


def memory_bytes(text: Any) -> int | None:
    """Return the bytes of a size such as 2G, None if it is none."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    given = str(text).strip().upper().removesuffix("B").removesuffix("I")
    digits, unit = (given[:-1], given[-1:]) if given[-1:] in units else (given, "")
    try:
        value = float(digits)
    except ValueError:
        return None
    size = int(value * units.get(unit, 1))
    return size if size > 0 else None
