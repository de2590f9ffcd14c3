"""Where a sample comes from, in words: file and line, or source, split and index."""

import csv
import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runspec.files import parse_json
from runspec.keys.fields import FILE_SOURCES
from runspec.tables import separator

JSON_LINES = (".json", ".jsonl")
TABLES = (".csv", ".tsv")


def data_files(block: dict[str, Any]) -> list[Path]:
    """The local files that a dataset block names."""
    source = None if block.get("source") in FILE_SOURCES else block.get("source")
    paths: set[Path] = set()
    for name in texts([block.get("data_files"), block.get("data_dir"), source]):
        for match in glob.glob(os.path.expanduser(name), recursive=True):
            path = Path(match)
            paths |= {p for p in path.rglob("*") if p.is_file()} if path.is_dir() else {path}
    return sorted(paths)


def texts(value: Any) -> list[str]:
    """All strings in nested lists and mappings."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [text for inner in value for text in texts(inner)]
    return [value] if isinstance(value, str) else []


def of_sample(block: dict[str, Any], index: int, row: dict[str, Any] | None = None) -> str:
    """Where sample `index` (from 0) of a dataset is.

    Args:
        block: the dataset's block of the config.
        row: the sample's columns, by which it is found in a part of a file or in several files.
    """
    split, paths = str(block.get("split", "train")), data_files(block)
    is_whole = len(paths) == 1 and split == "train" and not block.get("filter_fn")
    for path in paths:
        for number, (line, record) in enumerate(_records(path)):
            at_index = is_whole and number == index
            if at_index if row is None else _same(record, row, path):
                return f"{path}, line {line}"
    return f"{block.get('source')}, split {split}, sample {index} (counted from 0)"


def broken_line(block: dict[str, Any]) -> str | None:
    """File, line and reason of the first line that is no JSON or holds another type than before."""
    for path in data_files(block):
        if path.suffix not in JSON_LINES:
            continue
        kinds: dict[str, str] = {}
        for number, text in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1):
            try:
                record = parse_json(text) if text.strip() else {}
            except ValueError as error:
                return f"{path}, line {number}: not JSON: {error}"
            if not isinstance(record, dict):
                return f"{path}, line {number}: not a JSON object"
            for key, value in record.items():
                kind = "number" if type(value) in (int, float) else type(value).__name__
                if value is not None and kinds.setdefault(key, kind) != kind:
                    return f"{path}, line {number}: {key!r} is a {kind}, before it was {kinds[key]}"
    return None


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, columns) of each record of a JSON lines or CSV file; of another file nothing."""
    # A byte order mark is no part of the first column's name.
    with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
        if path.suffix in TABLES:
            reader = csv.DictReader(file, delimiter=separator(path))
            begin = 2
            for row in reader:
                yield begin, row
                begin = reader.line_num + 1
        elif path.suffix in JSON_LINES:
            for number, text in enumerate(file, 1):
                try:
                    record = parse_json(text) if text.strip() else None
                except ValueError:
                    return
                if isinstance(record, dict):
                    yield number, record


def _same(record: dict[str, Any], row: dict[str, Any], path: Path) -> bool:
    """Whether a row of the dataset is this record of a file."""
    if path.suffix in TABLES:
        return any(row.values()) and all((record.get(k) or None) == v for k, v in row.items())
    return _filled(record) == _filled(row)


def _filled(record: dict[str, Any]) -> dict[str, Any]:
    # Columns that another row has are None here.
    return {key: _equal(value) for key, value in record.items() if value is not None}


def _equal(value: Any) -> Any:
    """`value`, with a text in the place of each NaN, which is not equal to itself."""
    if isinstance(value, dict):
        return {key: _equal(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_equal(inner) for inner in value]
    return "NaN" if value != value else value
