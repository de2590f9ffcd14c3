"""Whether the dataset's files are there, and whether their first sample fits the recipe."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from launcher.checks import Context, Finding, Skipped, failed, ok, unreadable

# What datasets.load_dataset takes as a source if the data are files.
_FILE_SOURCES = {"json", "csv", "parquet", "text", "arrow"}


def files(context: Context) -> Iterable[Finding]:
    blocks = [
        (key, block)
        for key in ("dataset", "dataset_val")
        for value in [context.config.get(key)]
        for block in (value if isinstance(value, list) else [value])
        if isinstance(block, dict)
    ]
    found: list[Finding] = []
    seen: list[Path] = []
    for key, block in blocks:
        # What a validation set leaves out is the training set's.
        whole = {**blocks[0][1], **block} if key == "dataset_val" else block
        named = data_files({**whole, "data_files": block.get("data_files")})
        for path in filter(context.here, named):
            seen.append(path)
            why = unreadable(path) or _unfit(path, whole)
            if why:
                remedy = f"fix the path or the file, or set {key}.data_files="
                found.append(failed("dataset", f"{key}.data_files {path} {why}", remedy))
        source = block.get("source")
        if isinstance(source, str) and source.startswith(("/", "./", "../", "~")):
            folder = Path(source).expanduser()
            seen.append(folder)
            why = unreadable(folder) if context.here(folder) else None
            if why:
                remedy = f"fix the path, or set {key}.source="
                found.append(failed("dataset", f"{key}.source {source} {why}", remedy))
    if not found and not seen:
        raise Skipped("the data come from the hub, or are only on the nodes")
    return found or [ok("dataset", ", ".join(map(str, seen)))]


def data_files(block: dict[str, Any]) -> list[Path]:
    """Return the files that a dataset names; wildcards and addresses are the library's to open."""
    if block.get("source") not in _FILE_SOURCES:
        return []
    named = block.get("data_files")
    values = list(named.values()) if isinstance(named, dict) else [named]
    names = [name for value in values for name in (value if isinstance(value, list) else [value])]
    return [
        Path(str(name))
        for name in names
        if name and "://" not in str(name) and not re.search(r"[*?\[]", str(name))
    ]


def _unfit(path: Path, dataset: dict[str, Any]) -> str | None:
    """Say why a file of JSON lines cannot hold the samples, from its first line that has text."""
    if path.suffix != ".jsonl":
        return None
    with path.open(encoding="utf-8", errors="replace") as file:
        lines = enumerate(file, 1)
        number, first = next(((n, line) for n, line in lines if line.strip()), (0, ""))
    if not number:
        return "is empty"
    try:
        sample = json.loads(first)
    except ValueError as error:
        return f"cannot be used: line {number} is not JSON ({error})"
    if not isinstance(sample, dict):
        return f"cannot be used: line {number} is not a JSON object"
    columns = dataset.get("column_map")
    for column in columns.values() if isinstance(columns, dict) else ():
        if column not in sample:
            only = ", ".join(sample)
            return f"has no column {column!r} of column_map in line {number}, only {only}"
    return None
