"""Copies rows that a library reads into Parquet files: Hub datasets, Delta tables, queries."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from plugins.data import parquet
from plugins.data.errors import DataError, first_line
from plugins.data.inputs import Input
from runspec import files, publish
from runspec.files import patient_json

# Rows of a stored file, at least.
_STORED_ROWS = 200_000
_FETCHED_ROWS = 10_000

# What a reader returns: the name of what it read, and a function that yields its Arrow batches.
Rows = tuple[str, Callable[[], Iterator[Any]]]


def copied(
    kind: str,
    source: Mapping[str, Any],
    name: str,
    base: Path,
    folder: Path,
    where: str,
    limit: int | None,
    say: Callable[[str], None],
) -> list[Input]:
    """Copy the rows of a source into Parquet files unless they exist, and return the files.

    Args:
        base: of relative paths.
        folder: of the copy.
        limit: maximum number of rows.

    Raises:
        DataError: the source cannot be read, or has no rows.
    """
    try:
        origin, batches = READERS[kind](source, base, where)
        note, asked = folder / "_origin.json", {"origin": origin, "limit": limit}
        # A query may return other rows each time.
        if kind == "sql" or patient_json(note) != asked:
            say(f"{where}: copying its rows")
            with publish.folder(folder, "replace", flush=True) as temporary:
                _write(batches(), temporary, where, limit)
                files.write_json(temporary / note.name, asked)
    except ImportError as error:
        package = error.name or kind
        how = f".venv/bin/pip install {package}"
        how = "bash setup.sh --with tables" if kind == "delta" else how
        raise DataError(f"{where}: the package {package} is missing: {how}") from None
    made, first = [], 1
    for path in sorted(folder.glob("*.parquet")):
        rows, blocks = parquet.checked(path, where)
        facts, digest = path.stat(), files.sha256(path)
        what = name, str(path), "parquet", facts.st_size, digest, origin, rows
        made.append(Input(*what, first, facts.st_mtime_ns, tuple(blocks)))
        first += rows
    return made


def _write(batches: Iterator[Any], folder: Path, where: str, limit: int | None) -> None:
    """Write batches as Parquet files of about _STORED_ROWS rows."""
    import pyarrow.parquet as pq

    writer, number, rows, left = None, 0, 0, limit
    try:
        for batch in batches:
            batch = batch if left is None else batch.slice(0, left)
            if not batch.num_rows:
                continue
            if writer is None:
                # Plain types, whatever the library's are.
                path = folder / f"part-{number:05d}.parquet"
                writer = pq.ParquetWriter(path, batch.schema, store_schema=False)
            writer.write(batch)
            rows += batch.num_rows
            left = None if left is None else left - batch.num_rows
            if left == 0:
                break
            if rows >= (number + 1) * _STORED_ROWS:
                writer.close()
                writer, number = None, number + 1
    finally:
        if writer is not None:
            writer.close()
    if not rows:
        raise DataError(f"{where}: has no rows")


def _hub(source: Mapping[str, Any], base: Path, where: str) -> Rows:
    from datasets import load_dataset

    name, _, revision = str(source["repository"]).partition("@")
    split = str(source.get("split") or "train")
    try:
        dataset = load_dataset(name, split=split, revision=revision or None)
    except Exception as error:
        raise DataError(
            f"{where}: {name} (split {split}) cannot be loaded: {first_line(error)}: compute nodes "
            "often reach no hub; run it once on the login node"
        ) from None
    checksums = sorted(dataset.info.download_checksums or {})
    origin = f"{name}@{revision or 'main'} {split} {' '.join(checksums[:3])}".strip()
    return origin, lambda: dataset.with_format("arrow").iter(_FETCHED_ROWS)


def _delta(source: Mapping[str, Any], base: Path, where: str) -> Rows:
    from deltalake import DeltaTable, QueryBuilder

    path = str(source["path"])
    path = path if "://" in path else str(base / os.path.expanduser(path))
    try:
        table = DeltaTable(path, version=source.get("version"))
    except Exception as error:
        raise DataError(
            f"{where}: {path} cannot be read as a Delta table: {first_line(error)}"
        ) from None

    def batches() -> Iterator[Any]:
        import pyarrow as pa

        # One partition, so that the order of the rows is the same each time.
        query = QueryBuilder({"datafusion.execution.target_partitions": "1"})
        schema = pa.schema(table.schema().to_arrow())
        try:
            found = query.register("asked", table).execute("SELECT * FROM asked")
            for batch in pa.RecordBatchReader.from_stream(found):
                # Without views of strings, which cannot be written.
                yield batch.select(schema.names).cast(schema)
        except Exception as error:
            raise DataError(
                f"{where}: {path} cannot be read: {first_line(error)}: run it on the table's "
                "newest version"
            ) from None

    return f"{path}, version {table.version()}", batches


def _sql(source: Mapping[str, Any], base: Path, where: str) -> Rows:
    query = str(source["query"]).strip().rstrip(";")

    def batches() -> Iterator[Any]:
        import ibis

        url = os.path.expandvars(str(source["url"]))
        con = None
        try:
            con = ibis.connect(url)
            yield from con.to_pyarrow_batches(con.sql(query), chunk_size=_FETCHED_ROWS)
        except ImportError:
            raise
        except Exception as error:
            reason = first_line(error).replace(url, _shown(source))
            raise DataError(f"{where}: the database does not answer the query: {reason}") from None
        finally:
            if con is not None:
                con.disconnect()

    return f"{_shown(source)}: {query}", batches


def _shown(source: Mapping[str, Any]) -> str:
    """Return the address of a database without the user and the password."""
    url = str(source["url"])
    return re.sub(r"(?i)((?:password|pwd|token|secret)=)[^&]*", r"\1***", url.rpartition("@")[2])


READERS: Mapping[str, Callable[[Mapping[str, Any], Path, str], Rows]] = {
    "hub": _hub,
    "delta": _delta,
    "sql": _sql,
}
