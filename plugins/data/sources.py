"""Finds the files of sources, and makes the tasks that read them."""

import glob
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from plugins.data import copies, openers, parquet
from plugins.data.datarecipe import SUFFIXES, source_name, source_type
from plugins.data.errors import DataError
from plugins.data.ingest import BAD_SUFFIX
from plugins.data.inputs import Input
from plugins.data.query_engines.tasks import Task

_SUFFIXES = tuple(SUFFIXES)


def find(
    config: Mapping[str, Any],
    base: Path,
    store: Path,
    threads: int,
    say: Callable[[str], None],
    limit: int | None = None,
) -> list[Input]:
    """Return the inputs of all sources.

    Args:
        base: the base folder of relative paths.
        store: a folder for copies of datasets, tables and queries.
        limit: if it is given, only the first rows are read, and no file is hashed.

    Raises:
        DataError: a source is missing, empty or of no known type; all faults at once.
    """
    faults: list[str] = []
    inputs: list[Input] = []
    encodings: dict[str, str] = {}
    for number, source in enumerate(config["sources"]):
        name = source_name(source, number)
        where = f"source {name!r}"
        try:
            kind = source_type(source)
            if kind is not None and kind in copies.READERS:
                most = _least(limit, source.get("max_rows"))
                inputs += copies.copied(kind, source, name, base, store / name, where, most, say)
            else:
                for each in _files(source, name, base, where):
                    if each.type != "parquet":
                        given = source.get("encoding")
                        encodings[each.file] = openers.encoding_of(Path(each.file), given, where)
                    inputs.append(each)
        except DataError as error:
            faults += error.faults
        except OSError as error:
            faults.append(f"{where}: {error.filename or ''}: {error.strerror or error}")
    if faults:
        raise DataError(*faults)

    def surveyed(item: tuple[int, Input]) -> Input:
        number, each = item
        if each.sha256:
            return replace(each, number=number)
        return _surveyed(replace(each, number=number), encodings.get(each.file), limit)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(surveyed, enumerate(inputs)))


def _files(source: Mapping[str, Any], name: str, base: Path, where: str) -> Iterator[Input]:
    for path in matches(source, base, where):
        kind = source_type(source, path)
        if kind is None:
            raise DataError(f"{where}: {path}: cannot tell its type: set type= of the source")
        size, changed = path.stat().st_size, path.stat().st_mtime_ns
        if size == 0:
            raise DataError(f"{where}: {path} is empty: remove it, or write rows to it")
        rows, blocks = parquet.checked(path, where) if kind == "parquet" else (None, [])
        more = tuple(blocks)
        yield Input(name, str(path), kind, size, rows=rows, mtime_ns=changed, blocks=more)


def _surveyed(each: Input, encoding: str | None, limit: int | None) -> Input:
    """Read a file for its hash and its blocks; for a preview only size and time are hashed."""
    path = Path(each.file)
    by_lines = each.type == "jsonl" and path.suffix in _SUFFIXES
    blocks: list[dict[str, Any]]
    if limit is None:
        cut = by_lines and encoding is not None and openers.ends_lines_as_ascii(encoding)
        digest, blocks = openers.survey(path, cut)
    else:
        facts = f"{each.file} {each.bytes} {each.mtime_ns}"
        digest = hashlib.sha256(facts.encode()).hexdigest()
        blocks = [{"line": 1}]
    if encoding is not None:
        if encoding == "utf-8-sig" and each.type == "jsonl":
            # The byte order mark does not belong to the first line.
            blocks[0]["begin"] = len(openers.UTF8_MARK)
        blocks = [{**block, "encoding": encoding} for block in blocks]
    return replace(each, sha256=digest, blocks=each.blocks or tuple(blocks))


# What the log of a table matches, and how to read the table.
_TABLES = {
    "_delta_log/*.json": "a Delta table: set path={} and type=delta",
    "metadata/*.metadata.json": "an Iceberg table: write its rows as Parquet (docs/data.md)",
}


def matches(source: Mapping[str, Any], base: Path, where: str) -> list[Path]:
    """Return the files of a path: a file, a folder of known files, or a pattern."""
    text = os.path.expanduser(str(source["path"]))
    path = Path(text) if os.path.isabs(text) else base / text
    if path.is_dir():
        packed = ("", ".gz", ".bz2", ".xz", ".zst")
        names = tuple(suffix + end for suffix in _SUFFIXES for end in packed)
        paths = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(names))
        paths = [p for p in paths if not p.name.startswith((".", "_"))]
        if not paths:
            raise DataError(f"{where}: the folder {path} has no files of {', '.join(_SUFFIXES)}")
        for mark, how in _TABLES.items():
            # Its files include rows that were deleted, and its log.
            if table := next((p for p in paths if p.match(mark)), None):
                folder = table.parent.parent
                raise DataError(f"{where}: {folder} is {how.format(folder)}")
        return paths
    if path.is_file():
        return [path]
    paths = sorted(Path(each) for each in glob.glob(str(path), recursive=True))
    paths = [each for each in paths if each.is_file()]
    if not paths:
        what = "no file fits the pattern" if glob.has_magic(str(path)) else "there is no file"
        raise DataError(f"{where}: {what} {path}: fix path of the source")
    return paths


def tasks(
    config: Mapping[str, Any],
    inputs: Sequence[Input],
    folder: Path,
    all_keep: Mapping[str, str],
    limit: int | None,
) -> list[Task]:
    """Return the tasks that read the inputs, in the order of their rows.

    limit: maximum number of rows of each source.
    """
    made: list[Task] = []
    for number, source in enumerate(config["sources"]):
        name = source_name(source, number)
        options = {
            "name": name,
            "format": source["format"],
            "columns": dict(source.get("columns") or {}),
            "keep": dict(source.get("keep") or {}),
            "all_keep": dict(all_keep),
        }
        blocks = [
            {**block, "file": each.file, "number": each.number, "type": each.type}
            for each in inputs
            if each.source == name
            for block in each.blocks
        ]
        for group, most in _capped(blocks, _least(limit, source.get("max_rows"))):
            target = folder / f"part-{len(made):05d}.parquet"
            bad = str(folder / f"_{target.stem}{BAD_SUFFIX}")
            known = [block.get("rows", block.get("lines")) for block in group]
            rows = None if None in known else sum(known)
            given = {"source": options, "blocks": group, "bad": bad, "limit": most}
            made.append(Task("plugins.data.ingest:read_blocks", str(target), given, rows))
    return made


def _least(*limits: int | None) -> int | None:
    return min((each for each in limits if each is not None), default=None)


def _capped(
    blocks: Sequence[Mapping[str, Any]], cap: int | None
) -> Iterator[tuple[list[Mapping[str, Any]], int | None]]:
    """Yield (blocks, maximum number of rows) of each task of a source."""
    if cap is None:
        for block in blocks:
            yield [block], None
        return
    if any(block.get("rows") is None for block in blocks):
        # The file of the last row is unknown: one task reads all of them in turn.
        yield list(blocks), cap
        return
    for block in blocks:
        if cap <= 0:
            return
        yield [{**block, "rows": min(cap, block["rows"])}], cap
        cap -= block["rows"]


def unchanged(inputs: Sequence[Input]) -> None:
    """Raise DataError for files that were changed since they were first read."""
    faults = []
    for each in inputs:
        if not each.mtime_ns:
            continue
        try:
            facts = os.stat(each.file)
            same = (facts.st_size, facts.st_mtime_ns) == (each.bytes, each.mtime_ns)
        except OSError:
            same = False
        if not same:
            faults.append(
                f"source {each.source!r}: {each.file} changed while it was read: run it again once "
                "nothing writes to it"
            )
    if faults:
        raise DataError(*faults)
