"""Snapshots of Delta and Iceberg tables: their Parquet files, and how each is read.

Only the table's log is read here. The files are read in place, by the tasks of the engine.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from plugins.data import parquet
from plugins.data.errors import DataError, first_line
from plugins.data.inputs import Input
from plugins.data.parquet import Layout

# Reader features of Delta that are supported, or do not change the rows.
_FEATURES = {
    "columnMapping",
    "deletionVectors",
    "timestampNtz",
    "typeWidening",
    "typeWidening-preview",
    "v2Checkpoint",
    "vacuumProtocolCheck",
}


def delta(source: Mapping[str, Any], name: str, base: Path, work: Path, where: str) -> list[Input]:
    """Return the files of a Delta table, of the newest or the requested version.

    Args:
        work: a folder of the preparation for the flags of rows that are not deleted.

    Raises:
        DataError: there is no such table or version, or it needs an unsupported reader feature.
    """
    import pyarrow as pa
    from deltalake import DeltaTable

    path = _place(source, base)
    newest = None
    try:
        table = DeltaTable(path)
        newest = table.version()
        if (asked := _version(source)) is not None:
            table.load_as_version(asked)
            _check_begun(table, asked)
    except Exception as error:
        end = "" if newest is None else f" (its newest version is {newest})"
        raise DataError(_no_table(source, "Delta", path, where, error) + end) from None
    facts = table.protocol()
    unknown = set(facts.reader_features or []) - _FEATURES
    if unknown:
        raise DataError(
            f"{where}: {path} uses Delta's {', '.join(sorted(unknown))}, which this kit cannot "
            "read: drop the feature with ALTER TABLE ... DROP FEATURE, or write the rows as Parquet"
        )
    schema = pa.schema(table.schema().to_arrow())
    mode = (table.metadata().configuration or {}).get("delta.columnMapping.mode") or "none"
    wanted = b"delta.columnMapping.id" if mode == "id" else b"delta.columnMapping.physicalName"
    keys = {} if mode == "none" else _keys(schema, wanted)
    root = path if "://" in path else str(Path(path).absolute())
    has_deletions = "deletionVectors" in (facts.reader_features or [])
    deleted = _delta_flags(table, work) if has_deletions else {}
    origin = f"{path}, version {table.version()}"
    made = []
    for each in pa.table(table.get_add_actions(flatten=True)).to_pylist():
        inner = unquote(each["path"])
        file = inner if "://" in inner else f"{root.rstrip('/')}/{inner}"
        constants = {
            key.removeprefix("partition."): value
            for key, value in each.items()
            if key.startswith("partition.")
        }
        flags, gone = deleted.pop(_bare(file), (None, 0))
        layout = Layout(schema, keys, mode == "id", constants, flags)
        known = each.get("num_records")
        rows = None if known is None else known - gone
        size = int(each["size_bytes"])
        made.append(_input(name, file, size, rows, origin, layout, [each["path"], gone], known))
    if deleted:
        raise DataError(
            f"{where}: {path}: {len(deleted)} files with deleted rows are not in the list of "
            f"files, first {next(iter(deleted))}: run REORG TABLE ... APPLY (PURGE) on the table"
        )
    return made


def _delta_flags(table: Any, work: Path) -> dict[str, tuple[str, int]]:
    """Write a flag per row of each file with deleted rows; return their files and counts."""
    import numpy as np
    import pyarrow as pa

    by_file: dict[str, tuple[str, int]] = {}
    work.mkdir(parents=True, exist_ok=True)
    for batch in pa.RecordBatchReader.from_stream(table.deletion_vectors()):
        for place in range(batch.num_rows):
            uri = batch.column("filepath")[place].as_py()
            flags = batch.column("selection_vector")[place].values.to_numpy(zero_copy_only=False)
            by_file[_bare(unquote(uri))] = _flags(work, uri, np.asarray(flags, bool))
    return by_file


def _flags(work: Path, file: str, flags: Any) -> tuple[str, int]:
    import numpy as np

    count = int((~flags).sum())
    name = hashlib.sha256(f"{file} {flags.tobytes().hex()[:64]} {count}".encode()).hexdigest()[:20]
    target = work / f"{name}.npy"
    np.save(target, flags)
    return str(target), count


def _bare(file: str) -> str:
    """Return a file's path without the scheme file:."""
    return re.sub(r"^file:/*", "/", file)


def _keys(schema: Any, wanted: bytes) -> dict[tuple[str, ...], str]:
    """Return an entry of the fields' metadata by the path of each field that has it."""
    return {
        path: each.metadata[wanted].decode()
        for path, each in _fields(schema, ())
        if each.metadata and wanted in each.metadata
    }


def _fields(fields: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path of names and each field of a schema, those of structs and lists too."""
    import pyarrow as pa

    for each in fields:
        here = (*path, each.name)
        yield here, each
        kind = each.type
        while pa.types.is_list(kind) or pa.types.is_large_list(kind):
            kind, here = kind.value_type, (*here, "element")
        if pa.types.is_struct(kind):
            yield from _fields([kind.field(n) for n in range(kind.num_fields)], here)


def iceberg(
    source: Mapping[str, Any], name: str, base: Path, work: Path, where: str
) -> list[Input]:
    """Return the files of an Iceberg table, of its newest or the requested snapshot.

    Raises:
        DataError: there is no such table or snapshot, or it has what cannot be read.
    """
    from pyiceberg.io.pyarrow import schema_to_pyarrow
    from pyiceberg.table import StaticTable

    path = _place(source, base)
    try:
        table = StaticTable.from_metadata(_newest_metadata(path))
        snapshot = _snapshot(table, source)
        if snapshot is None:
            raise DataError(f"{where}: {path} has no rows: it has no snapshot yet")
        scan = table.scan(snapshot_id=snapshot.snapshot_id)
        tasks = list(scan.plan_files())
        shape = scan.projection()
    except DataError:
        raise
    except Exception as error:
        if "equality deletes" in str(error):
            raise DataError(
                f"{where}: {path} has equality deletes, which this kit cannot read: compact the "
                "table, for example with CALL system.rewrite_data_files"
            ) from None
        raise DataError(_no_table(source, "Iceberg", path, where, error)) from None
    schema = schema_to_pyarrow(shape)
    keys = _keys(schema, parquet.FIELD_ID)
    origin = f"{path}, snapshot {snapshot.snapshot_id}"
    defaults = {
        each.name: each.initial_default
        for each in shape.fields
        if getattr(each, "initial_default", None) is not None
    }
    made = []
    for task in tasks:
        file = task.file
        if str(file.file_format).rpartition(".")[2].upper() != "PARQUET":
            raise DataError(
                f"{where}: {file.file_path} is {file.file_format}, and only Parquet is read: "
                "rewrite the table's files as Parquet"
            )
        flags, gone = _iceberg_flags(task, table.io, work, where)
        spec = table.specs()[file.spec_id]
        constants = {
            str(shape.find_column_name(part.source_id)): file.partition[place]
            for place, part in enumerate(spec.fields)
            if str(part.transform) == "identity"
        }
        layout = Layout(schema, keys, True, {**defaults, **constants}, flags)
        size, count = int(file.file_size_in_bytes), int(file.record_count)
        local = _bare(file.file_path)
        facts = [file.file_path, gone]
        made.append(_input(name, local, size, count - gone, origin, layout, facts, count))
    return sorted(made, key=lambda each: each.file)


def _iceberg_flags(task: Any, io: Any, work: Path, where: str) -> tuple[str | None, int]:
    """Write a flag per row of a file with deleted rows, from delete files and deletion vectors."""
    import numpy as np
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    if not task.delete_files:
        return None, 0
    flags = np.ones(int(task.file.record_count), bool)
    for each in sorted(task.delete_files, key=lambda each: str(each.file_path)):
        form = str(each.file_format).rpartition(".")[2].upper()
        with io.new_input(each.file_path).open() as file:
            if form == "PARQUET":
                table = pq.read_table(file, columns=["file_path", "pos"])
                places = table.filter(pc.equal(table["file_path"], task.file.file_path))["pos"]
            elif form == "PUFFIN":
                from pyiceberg.table.deletion_vector import deletion_vectors_from_puffin_file
                from pyiceberg.table.puffin import PuffinFile

                vectors = deletion_vectors_from_puffin_file(PuffinFile(file.read()))
                fitting = [v for v in vectors if v.referenced_data_file == task.file.file_path]
                places = fitting[0].to_vector() if fitting else None
            else:
                raise DataError(
                    f"{where}: the deletes in {each.file_path} are {form}, which this kit cannot "
                    "read: compact the table"
                )
        if places is not None:
            flags[places.to_numpy()] = False
    work.mkdir(parents=True, exist_ok=True)
    return _flags(work, task.file.file_path, flags)


def _check_begun(table: Any, asked: int | datetime) -> None:
    """Raise ValueError for a time before the first version: deltalake would read that one."""
    if isinstance(asked, datetime) and table.version() == 0:
        begun = datetime.fromtimestamp(table.history()[-1]["timestamp"] / 1000, UTC)
        if asked < begun:
            raise ValueError(f"its first version is of {begun.isoformat(timespec='seconds')}")


def _snapshot(table: Any, source: Mapping[str, Any]) -> Any:
    asked = _version(source)
    if asked is None:
        return table.current_snapshot()
    if isinstance(asked, int):
        snapshot = table.snapshot_by_id(asked)
        known = ", ".join(str(each.snapshot_id) for each in table.snapshots()[-5:])
        fault = f"there is no snapshot {asked}; the newest are {known}"
    else:
        snapshot = table.snapshot_as_of_timestamp(int(asked.timestamp() * 1000))
        fault = f"it had no snapshot at {asked}"
    if snapshot is None:
        raise ValueError(fault)
    return snapshot


def _newest_metadata(path: str) -> str:
    """Return the newest metadata file of an Iceberg table; path: its folder, or that file."""
    folder = Path(path) / "metadata"
    if not folder.is_dir():
        return path
    # v3.metadata.json, or 00003-<id>.metadata.json.
    versions = {
        int(re.sub(r"\D.*", "", p.name.lstrip("v")) or 0): p for p in folder.glob("*.metadata.json")
    }
    return str(versions[max(versions)]) if versions else path


def _place(source: Mapping[str, Any], base: Path) -> str:
    path = str(source["path"])
    return path if "://" in path else str(base / os.path.expanduser(path))


def _version(source: Mapping[str, Any]) -> int | datetime | None:
    """Return the requested version of a source: a number, or a time, by default in UTC."""
    if source.get("version") is not None:
        return int(source["version"])
    asked = source.get("timestamp")
    if asked is None:
        return None
    if isinstance(asked, str):
        asked = datetime.fromisoformat(asked)
    if isinstance(asked, date) and not isinstance(asked, datetime):
        asked = datetime(asked.year, asked.month, asked.day)
    return asked if asked.tzinfo else asked.replace(tzinfo=UTC)


def _no_table(source: Mapping[str, Any], kind: str, path: str, where: str, error: Exception) -> str:
    reason = first_line(error)
    if _version(source) is not None:
        key = "timestamp" if source.get("version") is None else "version"
        return f"{where}: {path} cannot be read as a {kind} table at {key}={source[key]}: {reason}"
    return f"{where}: {path} is not a table of {kind}: {reason}"


def _input(
    name: str,
    file: str,
    size: int,
    rows: int | None,
    origin: str,
    layout: Layout,
    facts: list[Any],
    whole: int | None,
) -> Input:
    """Return a file of a table. It is never rewritten, so that its log entry is its identity."""
    blocks: list[dict[str, Any]] = [{"line": 1, "rows": rows}]
    if size > parquet.LARGE:
        with parquet.opened(file) as opened:
            blocks = parquet.cut(opened.metadata, size)
    text = json.dumps([origin, size, whole, *facts], default=str)
    return Input(
        name,
        file,
        "parquet",
        size,
        hashlib.sha256(text.encode()).hexdigest(),
        origin,
        rows,
        blocks=tuple({**block, "layout": layout} for block in blocks),
    )


READERS: dict[str, tuple[str, Callable[..., list[Input]]]] = {
    "delta": ("deltalake", delta),
    "iceberg": ("pyiceberg", iceberg),
}
