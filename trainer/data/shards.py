"""Files of text in parts that can be read one by one: Parquet, JSON lines, plain text.

Compressed JSON lines and text (.gz, .zst, .bz2) are one part each, because they can only be read
from the beginning.
"""

import glob
import io
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import parquet

from runspec.files import parse_json
from runspec.storage import patiently
from trainer.errors import ConfigError

# Lines of an uncompressed file that are read at once: those that begin in this many bytes.
PART_BYTES = 16 * 2**20
# Documents of a Parquet or a compressed file that are read, and shuffled, together.
BLOCK = 1024
COMPRESSED = (".gz", ".zst", ".bz2")
# Footers of Parquet files that are read at once.
THREADS = 16


class Part(NamedTuple):
    """A part of a file that one stream reads."""

    path: str
    # Bytes of a file of lines, or row groups of a Parquet file; (0, 0) is all of it.
    begin: int
    end: int
    # Of these documents the stream has every `stripes`-th, from number `stripe` on.
    stripe: int = 0
    stripes: int = 1


def files_of(key: str, given: Any) -> list[Path]:
    """The files that a path, a pattern, a folder or a list of them names, sorted.

    Raises:
        ConfigError: there is none, or one whose kind is not known.
    """
    chosen: set[Path] = set()
    for name in given if isinstance(given, list) else [given]:
        pattern = str(Path(str(name)).expanduser())
        paths = [Path(match) for match in glob.glob(pattern, recursive=True)]
        own = [
            inner
            for path in paths
            for inner in (path.rglob("*") if path.is_dir() else [path])
            if inner.is_file() and not inner.name.startswith((".", "_"))
        ]
        if not own:
            raise ConfigError(f"{key}: {name} names no file; give a file, a pattern or a folder")
        chosen |= set(own)
    unknown = sorted(path for path in chosen if _kind(path) is None)
    if unknown:
        raise ConfigError(
            f"{key}: {unknown[0]} is of no known kind: .parquet, .jsonl, .json (a record per "
            "line) or .txt (a document per line), the last three also as .gz, .zst, .bz2"
        )
    return sorted(chosen)


def _kind(path: Path) -> str | None:
    suffixes = [suffix for suffix in path.suffixes if suffix not in COMPRESSED]
    kinds = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text"}
    return kinds.get(suffixes[-1]) if suffixes else None


def parts_of(paths: list[Path], least: int) -> list[Part]:
    """The parts of files, at least this many.

    Files with fewer parts are read by several streams, each of which takes every n-th document.

    Raises:
        ConfigError: a Parquet file cannot be read.
    """
    with ThreadPoolExecutor(THREADS) as threads:
        pieces = [part for parts in threads.map(_parts, paths) for part in parts]
    stripes = -(-least // max(1, len(pieces)))
    return [part._replace(stripe=n, stripes=stripes) for part in pieces for n in range(stripes)]


def _parts(path: Path) -> list[Part]:
    if _kind(path) == "parquet":
        try:
            groups = patiently(parquet.read_metadata, path).num_row_groups
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None
        return [Part(str(path), group, group + 1) for group in range(groups)]
    if path.suffix in COMPRESSED:
        return [Part(str(path), 0, 0)]
    size = path.stat().st_size
    begins = range(0, size, PART_BYTES)
    return [Part(str(path), begin, min(begin + PART_BYTES, size)) for begin in begins]


def blocks(part: Part, column: str) -> Iterator[list[str]]:
    """The texts of a part, in blocks; texts that are missing or empty are left out.

    Args:
        column: of a Parquet file, or key of a record, that holds the text.

    Raises:
        ConfigError: the file is damaged, has no such column, or holds something else in it.
    """
    number = 0
    try:
        for block in _patient(part, column):
            own = [text for n, text in enumerate(block, number) if n % part.stripes == part.stripe]
            number += len(block)
            yield [_checked(part, column, text) for text in own if text not in (None, "")]
    except (OSError, pa.ArrowException, EOFError, UnicodeDecodeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{part.path}: cannot be read: {reason}") from None


def _patient(part: Part, column: str) -> Iterator[list[Any]]:
    """What _read yields; while the storage cannot be read, it is read again from the beginning."""
    done, stream = 0, _read(part, column)

    def following(_: Path) -> list[Any] | None:
        nonlocal stream
        try:
            return next(stream, None)
        except OSError:
            stream = itertools.islice(_read(part, column), done, None)
            raise

    while (block := patiently(following, Path(part.path))) is not None:
        done += 1
        yield block


def _checked(part: Part, column: str, text: Any) -> str:
    if not isinstance(text, str):
        raise ConfigError(f"{part.path}: {column!r} holds a {type(text).__name__}, no text")
    return text


def _read(part: Part, column: str) -> Iterator[list[Any]]:
    path = Path(part.path)
    if _kind(path) == "parquet":
        yield from _parquet_blocks(part, column)
        return
    texts = (_text(part, line, column) for line in _lines(part))
    while block := [text for _, text in zip(range(BLOCK), texts, strict=False)]:
        yield block


def _parquet_blocks(part: Part, column: str) -> Iterator[list[Any]]:
    with parquet.ParquetFile(part.path) as file:
        if column not in file.schema_arrow.names:
            names = ", ".join(file.schema_arrow.names)
            raise ConfigError(f"{part.path}: there is no column {column!r}, only {names}")
        groups = range(part.begin, part.end)
        for batch in file.iter_batches(BLOCK, groups, [column], use_threads=False):
            yield batch.column(0).to_pylist()


def _lines(part: Part) -> Iterator[bytes]:
    """The lines that begin in the part's bytes."""
    if part.path.endswith(COMPRESSED):
        with pa.input_stream(part.path, compression="detect") as stream:
            yield from io.BufferedReader(stream)
        return
    with open(part.path, "rb") as file:
        if part.begin:
            # The byte before tells whether a line begins here.
            file.seek(part.begin - 1)
            file.readline()
        while file.tell() < part.end and (line := file.readline()):
            yield line


def _text(part: Part, line: bytes, column: str) -> Any:
    if _kind(Path(part.path)) == "text":
        return line.decode("utf-8").rstrip("\r\n")
    if not line.strip():
        return None
    try:
        record = parse_json(line)
    except ValueError as error:
        raise ConfigError(
            f"{part.path}, behind byte {part.begin:,}: not JSON: {error}: {line[:60]!r}"
        ) from None
    if not isinstance(record, dict) or column not in record:
        content = f"only {', '.join(record)}" if isinstance(record, dict) else "it is no object"
        raise ConfigError(
            f"{part.path}, behind byte {part.begin:,}: a record has no {column!r}, {content}"
        )
    return record[column]
