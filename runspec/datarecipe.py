"""A data recipe: sources, steps and outputs; its keys and the check of what is given."""

import re
from collections.abc import Iterator, Mapping
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

TOP = {
    "description": "One line about the training set.",
    "engine": "auto, duckdb or spark. auto: Spark if more than one node is asked for.",
    "memory": "Memory limit of the engine before it spills: 2G. Default: half of this host's "
    "memory.",
    "threads": "Number of threads. Default: the CPUs that this process may use.",
    "temp_dir": "Folder to spill to, on a disk of the node. Default: TMPDIR or /tmp.",
    "max_bad_share": "Maximum share of unreadable rows. Default: 0.01.",
    "seed": "Seed of splits and samples. Default: 0.",
    "sources": "List of sources.",
    "steps": "List of steps, in their order.",
    "output": "format: messages, text, preference or delta; default: that of the sources.",
    "resources": "Resources that a job requests from Slurm, as in a training recipe.",
}
SOURCE = {
    "name": "Name of the source, for mixtures and reports.",
    "path": "File, folder or pattern.",
    "type": f"{', '.join(TYPES)}. Default: by the file's suffix.",
    "format": f"{', '.join(FORMATS)}.",
    "columns": "The source's names for the columns of the format: {question: q}.",
    "keep": "Columns to keep beside the text, with their types: {quality: number}.",
    "repository": "Dataset on the Hub: org/name or org/name@revision.",
    "split": "Split of a dataset on the Hub. Default: train.",
    "url": "Address of a database, for ibis: postgres://user@host/name.",
    "query": "SELECT statement for a database.",
    "partition_by": "Numeric column; its ranges are read in parallel.",
    "partitions": "Ranges of partition_by. Default: one per 500,000 rows, at most 256.",
    "version": "Version of a Delta table, or snapshot of an Iceberg table. Default: the newest.",
    "timestamp": "Read a Delta or Iceberg table as of this time: 2026-01-31T12:00:00Z.",
    "encoding": "Text encoding. Default: from the file's byte order mark, else utf-8.",
    "max_rows": "Maximum number of rows to read from the source.",
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
# The options of each step; the first one is what a bare value means.
STEPS: dict[str, tuple[str, ...]] = {
    "filter": ("where",),
    "length": ("max", "min", "column"),
    "language": ("keep", "column"),
    "quality": ("min", "column"),
    "exact_duplicates": ("columns", "keep", "normalise"),
    "near_duplicates": (
        "jaccard",
        "ngram",
        "bands",
        "rows_per_band",
        "keep",
        "action",
        "column",
    ),
    "decontaminate": ("against", "ngram", "min_hits"),
    "personal_data": (*PERSONAL, "regions"),
    "template": ("prompt", "answer", "system"),
    "tokens": ("max", "min", "tokenizer"),
    "mixture": ("weights", "rows"),
    "cap": ("rows", "by", "keep"),
    "split": ("shares", "stratify", "group", "like"),
}
REQUIRED = {
    "filter": ("where",),
    "language": ("keep",),
    "decontaminate": ("against",),
    "tokens": ("tokenizer",),
    "mixture": ("weights",),
    "cap": ("rows", "by"),
    "split": ("shares",),
}
# A mapping as the whole of these steps is their first option, not their options.
_MAPPING_FIRST = {"mixture": "weights", "split": "shares"}


def faults(config: Mapping[str, Any]) -> list[str]:
    """Return all faults of a data recipe, one line each."""
    texts = list(_unknown(config, TOP, ""))
    if config.get("engine", "auto") not in ENGINES:
        texts.append(f"engine must be one of {', '.join(ENGINES)}, got {config['engine']!r}")
    share = config.get("max_bad_share", 0.01)
    if not _is_number(share) or not 0 <= share <= 1:
        texts.append(f"max_bad_share must be a number from 0 to 1, got {share!r}")
    threads = config.get("threads")
    if threads is not None and (type(threads) is not int or threads < 1):
        texts.append(f"threads must be a whole number, 1 or more, got {threads!r}")
    memory = config.get("memory")
    if memory is not None and memory_bytes(memory) is None:
        texts.append(f"memory must be a size such as 2G or 500M, got {memory!r}")
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
    if kinds.count("split") > 1:
        texts.append("steps: split is given twice: leave one out")
    if "split" in kinds and kinds.index("split") != len(kinds) - 1:
        texts.append(
            "steps: split must be the last step, so that its shares are those of the result"
        )
    output = config.get("output") or {}
    if not isinstance(output, dict):
        texts.append("output must be a block, such as {format: messages}")
    else:
        texts += _unknown(output, {"format": "", "rows": ""}, "output.")
        form, shape = output.get("format", "messages"), output.get("rows")
        if form not in (*SHAPES, "delta"):
            texts.append(f"output.format must be {', '.join(SHAPES)} or delta, got {form!r}")
        if shape is not None and form != "delta":
            texts.append("output.rows is used only with output.format=delta: leave it out")
        elif shape not in (None, *SHAPES):
            texts.append(f"output.rows must be one of {', '.join(SHAPES)}, got {shape!r}")
    return texts


def _unknown(given: Mapping[str, Any], known: Mapping[str, Any], start: str) -> Iterator[str]:
    for name in given:
        if name not in known:
            yield f"unknown key '{start}{name}'{nearest(str(name), known)}"


def _source_faults(source: Any, where: str) -> Iterator[str]:
    if not isinstance(source, dict):
        yield f"{where} must be a block with path and format, got {source!r}"
        return
    yield from _unknown(source, SOURCE, f"{where}.")
    places = [key for key in ("path", "repository", "url") if source.get(key)]
    if len(places) != 1:
        yield (
            f"{where} must have one of path, repository and url, got {', '.join(places) or 'none'}"
        )
    if source.get("url") and not source.get("query"):
        yield f"{where}.query is missing: the SELECT statement whose rows are read"
    form = source.get("format")
    if form not in FORMATS:
        hint = nearest(str(form), FORMATS)
        yield f"{where}.format must be one of {', '.join(FORMATS)}{hint}, got {form!r}"
    elif isinstance(source.get("columns"), dict):
        yield from _unknown(source["columns"], FORMATS[form], f"{where}.columns.")
    elif source.get("columns") is not None:
        yield f"{where}.columns must be a block such as {{question: q}}, got {source['columns']!r}"
    yield from _reading_faults(source, where)
    if source.get("type") not in (None, *TYPES):
        hint = nearest(str(source["type"]), TYPES)
        yield f"{where}.type must be one of {', '.join(TYPES)}{hint}, got {source['type']!r}"
    keep = source.get("keep") or {}
    if not isinstance(keep, dict):
        yield f"{where}.keep must be a block of columns and kinds, such as {{quality: number}}"
        return
    for column, kind in keep.items():
        if kind not in KINDS:
            yield f"{where}.keep.{column} must be one of {', '.join(KINDS)}, got {kind!r}"
        if column in OWN_COLUMNS:
            yield f"{where}.keep.{column}: the kit uses a column of that name itself"


def _reading_faults(source: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yield what is wrong with the keys that say how a source is read."""
    kind = source_type(source)
    for key, kinds in _ONLY.items():
        if source.get(key) is not None and kind not in kinds:
            names = " or ".join(filter(None, kinds))
            yield f"{where}.{key} is used only for the type {names}: leave it out"
    for key, least in (("max_rows", 1), ("partitions", 1), ("version", 0)):
        value = source.get(key)
        if value is not None and (type(value) is not int or value < least):
            yield f"{where}.{key} must be a whole number, {least} or more, got {value!r}"
    if source.get("partitions") and not source.get("partition_by"):
        yield f"{where}.partitions needs partition_by: the column whose ranges are read"
    column = source.get("partition_by")
    if column is not None and not re.fullmatch(r"[A-Za-z_]\w*", str(column)):
        yield f"{where}.partition_by must be a column of the query, got {column!r}"
    moment = source.get("timestamp")
    if moment is not None and source.get("version") is not None:
        yield f"{where} must have version or timestamp, not both"
    if isinstance(moment, str):
        try:
            datetime.fromisoformat(moment)
        except ValueError:
            yield f"{where}.timestamp must be a time such as 2026-01-31T12:00:00Z, got {moment!r}"
    elif moment is not None and not isinstance(moment, date):
        yield f"{where}.timestamp must be a time such as 2026-01-31T12:00:00Z, got {moment!r}"
    encoding = source.get("encoding")
    if encoding is not None:
        try:
            "a".encode(str(encoding))
        except (LookupError, UnicodeError):
            expected = "must be one that Python supports, such as utf-8"
            yield f"{where}.encoding {expected}, got {encoding!r}"


OWN_COLUMNS = ("id", "_id", "source", "prompt", "answer", "messages", "rejected", "text", "split")


def _step_faults(step: Any, where: str) -> Iterator[str]:
    if not _is_step(step):
        yield f"{where} must be one step such as 'filter: quality >= 0.85', got {step!r}"
        return
    name = step_name(step)
    if name not in STEPS:
        yield (
            f"{where}: there is no step {name!r}{nearest(str(name), STEPS)}; steps: "
            f"{', '.join(STEPS)}"
        )
        return
    options = step_options(step)
    yield from _unknown(options, dict.fromkeys(STEPS[name]), f"{where}.{name}.")
    for needed in REQUIRED.get(name, ()):
        if options.get(needed) in (None, [], {}):
            yield f"{where}.{name}.{needed} is missing"
    yield from _value_faults(name, options, f"{where}.{name}")


def _value_faults(name: str, options: Mapping[str, Any], where: str) -> Iterator[str]:
    whole = {"ngram", "bands", "rows_per_band", "min_hits", "rows"}
    number = {"min", "max", "jaccard"}
    for key, value in options.items():
        if key in whole and value is not None and (type(value) is not int or value < 1):
            yield f"{where}.{key} must be a whole number, 1 or more, got {value!r}"
        if key in number and value is not None and not _is_number(value):
            yield f"{where}.{key} must be a number, got {value!r}"
    jaccard = options.get("jaccard")
    if isinstance(jaccard, int | float) and not 0 < jaccard <= 1:
        yield f"{where}.jaccard must be above 0 and at most 1, got {jaccard!r}"
    if options.get("action") not in (None, "remove", "mark"):
        yield f"{where}.action must be remove or mark, got {options['action']!r}"
    if name == "personal_data":
        for kind, action in options.items():
            if kind in PERSONAL and action not in ("mask", "drop", "leave"):
                yield f"{where}.{kind} must be mask, drop or leave, got {action!r}"
        regions = options.get("regions")
        if regions is not None and not (
            isinstance(regions, list) and all(isinstance(each, str) for each in regions)
        ):
            yield f"{where}.regions must be a list of countries such as [DE, US], got {regions!r}"
    if name in _MAPPING_FIRST:
        yield from _share_faults(name, options.get(_MAPPING_FIRST[name]), where)
    low, high = options.get("min"), options.get("max")
    if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
        yield f"{where}: min {low} is above max {high}, so that no row is kept"


def _share_faults(name: str, shares: Any, where: str) -> Iterator[str]:
    if not isinstance(shares, dict) or not shares:
        yield f"{where} must be a block of names and shares, such as {{train: 0.8, test: 0.2}}"
        return
    for key, value in shares.items():
        if not _is_number(value) or value <= 0:
            yield f"{where}.{key} must be a number above 0, got {value!r}"
            return
        if name == "split" and not str(key).isidentifier():
            yield f"{where}: {key!r} is not a valid split name: use letters, digits and _"
    if name == "split" and abs(sum(shares.values()) - 1) > 1e-6:
        total = " + ".join(f"{value:g}" for value in shares.values())
        yield f"{where}: the shares must add up to 1; {total} = {sum(shares.values()):g}"


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


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
    if name in _MAPPING_FIRST and isinstance(value, dict) and not set(value) & set(known):
        return {_MAPPING_FIRST[name]: value}
    if isinstance(value, dict):
        return dict(value)
    return {} if value is None or value is True else {known[0]: value}


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
