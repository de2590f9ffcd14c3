"""Parquet files of text in parts that can be read one by one: their row groups."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import parquet

from runspec.storage import patiently
from trainer.data import origin
from trainer.errors import ConfigError

# Documents that are read, and shuffled, together.
BLOCK = 1024
# Footers of files that are read at once.
THREADS = 16


class Part(NamedTuple):
    """A part of a file that one stream reads."""

    path: str
    # The number of the row group.
    group: int
    # Of these documents the stream has every `stripes`-th, from number `stripe` on.
    stripe: int = 0
    stripes: int = 1


def files_of(key: str, given: Any) -> list[Path]:
    """The files that a path, a pattern, a folder or a list of them names, sorted.

    Raises:
        ConfigError: there is none, or one that is not Parquet.
    """
    chosen: set[Path] = set()
    for name in given if isinstance(given, list) else [given]:
        found = origin.data_files({"data_files": str(name)})
        own = {path for path in found if not path.name.startswith((".", "_"))}
        if not own:
            raise ConfigError(f"{key}: {name} names no file; give a file, a pattern or a folder")
        chosen |= own
    if others := sorted(path for path in chosen if path.suffix != ".parquet"):
        raise ConfigError(
            f"{key}: {others[0]} is not Parquet; make Parquet files of other ones with: "
            "cookbook prepare"
        )
    return sorted(chosen)


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
    try:
        groups = patiently(parquet.read_metadata, path).num_row_groups
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None
    return [Part(str(path), group) for group in range(groups)]


def blocks(part: Part, column: str) -> Iterator[list[str]]:
    """The texts of a part, in blocks; texts that are missing or empty are left out.

    Args:
        column: of the text.

    Raises:
        ConfigError: the file is damaged, has no such column, or holds something else in it.
    """
    number = 0
    try:
        for block in _patient(part, column):
            own = [text for n, text in enumerate(block, number) if n % part.stripes == part.stripe]
            number += len(block)
            yield [_checked(part, column, text) for text in own if text not in (None, "")]
    except (OSError, pa.ArrowException) as error:
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
    with parquet.ParquetFile(part.path) as file:
        if column not in file.schema_arrow.names:
            names = ", ".join(file.schema_arrow.names)
            raise ConfigError(f"{part.path}: there is no column {column!r}, only {names}")
        for batch in file.iter_batches(BLOCK, [part.group], [column], use_threads=False):
            yield batch.column(0).to_pylist()
