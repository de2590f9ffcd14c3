"""A data recipe: sources, steps and outputs; its keys and the check of what is given."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runspec.hints import nearest
from runspec.keys.key import REQUIRED, Key
from runspec.keys.key import faults as key_faults

FORMATS: dict[str, dict[str, str]] = {
    # Columns of each format, by the name that the kit gives them.
    "alpaca": {"instruction": "instruction", "input": "input", "output": "output"},
    "sharegpt": {"conversations": "conversations"},
    "messages": {"messages": "messages", "answer": ""},
    "qa": {"question": "question", "answer": "answer"},
    "text": {"text": "text"},
    "preference": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
}
SUFFIXES = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
PACKED = (".gz", ".bz2", ".xz", ".zst")
KINDS = ("text", "number", "whole", "flag")
PERSONAL = ("email", "phone", "iban", "card", "secret")
# Columns that the kit uses itself.
OWN_COLUMNS = ("id", "_id", "source", "prompt", "answer", "messages", "rejected", "text", "split")

_TOP = (
    Key("description", "text", "One line about the training set."),
    Key("engine", "auto | duckdb | spark", "auto: Spark if more than one node is asked for."),
    Key("memory", "any", "Memory of the engine before it spills: 2G. Default: half of the host's."),
    Key("threads", "positive", "Default: the CPUs that this process may use."),
    Key("temp_dir", "text", "Folder to spill to, on the node's disk. Default: TMPDIR or /tmp."),
    Key("max_bad_share", "rate", "Maximum share of unreadable rows. Default: 0.01."),
    Key("seed", "count", "Seed of splits and samples. Default: 0."),
    Key("sources", "list", "List of sources.", REQUIRED),
    Key("steps", "list", "List of steps, in their order."),
    Key("output", "block", "Default: the shape of the sources."),
    Key("output.format", "messages | text | preference", "What the rows are.", "messages"),
    Key("resources", "open block", "What a job requests, as in a training recipe."),
)
_SOURCE = (
    Key("name", "any", "Name of the source, for mixtures and reports."),
    Key("path", "text", "File, folder or pattern."),
    Key(
        "type",
        "json | jsonl | csv | parquet | hub | sql | delta",
        "Default: by the file's suffix.",
    ),
    Key("format", " | ".join(FORMATS), "What its records are.", REQUIRED),
    Key("columns", "open block", "The source's names for the format's columns: {question: q}."),
    Key("keep", "open block", "Columns to keep beside the text, with types: {quality: number}."),
    Key("repository", "text", "Dataset on the Hub: org/name or org/name@revision."),
    Key("split", "text", "Split of a dataset on the Hub. Default: train."),
    Key("url", "text", "Address of a database, for ibis: postgres://user@host/name."),
    Key("query", "any", "SELECT statement for a database."),
    Key("version", "count", "Of a Delta table. Default: the newest."),
    Key("encoding", "text", "Default: from the file's byte order mark, else utf-8."),
    Key("max_rows", "positive", "Maximum number of rows to read from the source."),
)
# Keys that only some types of sources use.
_ONLY: dict[str, tuple[str | None, ...]] = {
    # None: a folder or a pattern, whose files have types of their own.
    "encoding": ("json", "jsonl", "csv", None),
    "query": ("sql",),
    "split": ("hub",),
    "version": ("delta",),
}
_COLUMN = Key("column", "text", "Another column than the text.")
_KEEP = Key("keep", "text", "first, or the column whose highest value is kept.")
_LIMITS = (Key("max", "rate", "The most."), Key("min", "rate", "The least."))


@dataclass(frozen=True)
class Step:
    """A step of data recipes."""

    # MODULE:NAME of the function in plugins/data/steps, which takes rows and returns rows.
    function: str
    # docs/data.md; the first one is what a bare value means.
    options: tuple[Key, ...]
    # The columns that it adds, and their types; near_duplicates adds one with action: mark.
    adds: Mapping[str, str] = field(default_factory=dict)
    # Whether it changes texts, which are then shown before and after.
    changes_texts: bool = False
    # A mapping as its whole value is that of its first option, not its options.
    mapping_first: bool = False


# By name, in the order of docs/data.md.
STEPS = {
    "filter": Step("filters:condition", (Key("where", "any", "The condition.", REQUIRED),)),
    "length": Step("filters:length", (*_LIMITS, _COLUMN)),
    "language": Step(
        "scores:language",
        (Key("keep", "any", "Languages.", REQUIRED), _COLUMN),
        adds={"language": "string"},
    ),
    "exact_duplicates": Step(
        "exact:exact_duplicates",
        (
            Key("columns", "any", "Columns that are compared."),
            _KEEP,
            Key("normalise", "any", "Compare without case and spaces."),
        ),
    ),
    "near_duplicates": Step(
        "near:near_duplicates",
        (
            Key("jaccard", "share", "From which similarity on."),
            Key("ngram", "positive", "Words that are compared together."),
            Key("bands", "positive", "Bands of MinHash."),
            Key("rows_per_band", "positive", "Hashes in a band."),
            _KEEP,
            Key("action", "remove | mark", "What becomes of them."),
            _COLUMN,
        ),
    ),
    "personal_data": Step(
        "personal:personal_data",
        (
            *(Key(kind, "mask | drop | leave", "What becomes of it.") for kind in PERSONAL),
            Key("regions", "texts", "Countries of phone numbers, such as [DE, US]."),
        ),
        changes_texts=True,
    ),
    "template": Step(
        "templates:template",
        tuple(Key(each, "any", "Its text.") for each in ("prompt", "answer", "system")),
        changes_texts=True,
    ),
    "tokens": Step(
        "tokens:tokens",
        (*_LIMITS, Key("tokenizer", "text", "Its folder.", REQUIRED)),
        adds={"tokens": "int64"},
    ),
    "mixture": Step(
        "sampling:mixture",
        (Key("weights", "open block", "By source.", REQUIRED), Key("rows", "positive", "In all.")),
        mapping_first=True,
    ),
    "cap": Step(
        "sampling:cap",
        (
            Key("rows", "positive", "Rows per value.", REQUIRED),
            Key("by", "any", "The column.", REQUIRED),
            _KEEP,
        ),
    ),
    "split": Step(
        "splits:split",
        (
            Key("shares", "open block", "By split.", REQUIRED),
            Key("stratify", "any", "Columns of strata."),
            Key("group", "any", "Columns of groups."),
        ),
        adds={"split": "string"},
        mapping_first=True,
    ),
}


def faults(config: Mapping[str, Any]) -> list[str]:
    """Return all faults of a data recipe, one line each."""
    texts = list(_checked(config, _TOP))
    memory = config.get("memory")
    if memory is not None and memory_bytes(memory) is None:
        texts.append(f"memory must be a size such as 2G or 500M, got {memory!r}")
    sources, steps = (_items(config.get(name)) for name in ("sources", "steps"))
    if config.get("sources") == []:
        texts.append("sources is empty: name at least one, with path and format")
    for number, source in enumerate(sources):
        texts += _source_faults(source, f"sources.{number}")
    names = [source_name(each, n) for n, each in enumerate(sources) if isinstance(each, dict)]
    for name in sorted({name for name in names if names.count(name) > 1}):
        texts.append(f"sources: two have the name {name!r}: give each its own name")
    for number, step in enumerate(steps):
        texts += _step_faults(step, f"steps.{number}")
    kinds = [step_name(step) for step in steps if _is_step(step)]
    if kinds.count("split") > 1:
        texts.append("steps: split is given twice: leave one out")
    if "split" in kinds and kinds.index("split") != len(kinds) - 1:
        texts.append(
            "steps: split must be the last step, so that its shares are those of the result"
        )
    return texts


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _checked(values: Mapping[str, Any], table: Iterable[Key], where: str = "") -> Iterator[str]:
    """Yield what is wrong with a block's values by their table, with the block's dotted name."""
    keys = {key.name: key for key in table}
    if where:
        own = [replace(key, name=f"{where}.{key.name}") for key in keys.values()]
        keys = {key.name: key for key in (Key(where, "block", ""), *own)}
    return (fault.text for fault in key_faults(values, keys, where))


def _source_faults(source: Any, where: str) -> Iterator[str]:
    if not isinstance(source, dict):
        yield f"{where} must be a block with path and format, got {source!r}"
        return
    yield from _checked(source, _SOURCE, where)
    places = [key for key in ("path", "repository", "url") if source.get(key)]
    if len(places) != 1:
        yield (
            f"{where} must have one of path, repository and url, got {', '.join(places) or 'none'}"
        )
    if source.get("url") and not source.get("query"):
        yield f"{where}.query is missing: the SELECT statement whose rows are read"
    columns = FORMATS.get(str(source.get("format")))
    if columns is not None and isinstance(source.get("columns"), dict):
        own = [Key(name, "any", "") for name in columns]
        yield from _checked(source["columns"], own, f"{where}.columns")
    yield from _reading_faults(source, where)
    keep = source.get("keep")
    for column, kind in keep.items() if isinstance(keep, dict) else ():
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
    encoding = source.get("encoding")
    if encoding is not None:
        try:
            "a".encode(str(encoding))
        except (LookupError, UnicodeError):
            expected = "must be one that Python supports, such as utf-8"
            yield f"{where}.encoding {expected}, got {encoding!r}"


def _step_faults(step: Any, where: str) -> Iterator[str]:
    if not _is_step(step):
        yield f"{where} must be one step such as 'filter: quality >= 0.85', got {step!r}"
        return
    name = step_name(step)
    if name not in STEPS:
        hint = nearest(name, STEPS)
        yield f"{where}: there is no step {name!r}{hint}; steps: {', '.join(STEPS)}"
        return
    options, where = step_options(step), f"{where}.{name}"
    yield from _checked(options, STEPS[name].options, where)
    shares = options.get(STEPS[name].options[0].name)
    if STEPS[name].mapping_first and isinstance(shares, dict):
        yield from _share_faults(name, shares, where)
    low, high = options.get("min"), options.get("max")
    if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
        yield f"{where}: min {low} is above max {high}, so that no row is kept"


def _share_faults(name: str, shares: Mapping[str, Any], where: str) -> Iterator[str]:
    if not shares:
        yield f"{where} must be a block of names and shares, such as {{train: 0.8, test: 0.2}}"
        return
    for key, value in shares.items():
        if type(value) not in (int, float) or value <= 0:
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
    known = [key.name for key in STEPS[name].options]
    if STEPS[name].mapping_first and isinstance(value, dict) and not set(value) & set(known):
        return {known[0]: value}
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
