"""Datasets of the hub, copied into Parquet files once."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from datakit import parquet
from datakit.errors import DataError, first_line
from datakit.inputs import Input
from runspec import files, publish
from runspec.storage import patient_json

_ROWS = 10_000
# Rows of a stored file, a multiple of the rows that are fetched at a time.
_STORED_ROWS = 20 * _ROWS


def copied(
    source: Mapping[str, Any],
    name: str,
    folder: Path,
    where: str,
    limit: int | None,
    say: Callable[[str], None],
) -> list[Input]:
    """Copy a dataset into Parquet files unless they exist, and return them.

    limit: maximum number of rows.
    """
    note = folder / "_origin.json"
    asked = {key: source.get(key) for key in ("repository", "split")} | {"limit": limit}
    known = patient_json(note) or {}
    if known.get("asked") != asked:
        say(f"{where}: fetching its rows once")
        with publish.folder(folder, "replace", flush=True) as temporary:
            origin, tables = _loaded(source, where)
            _write(tables, temporary, where, limit)
            files.write_json(temporary / note.name, {"asked": asked, "origin": origin})
        known = files.read_json(note)
    made = []
    for path in sorted(folder.glob("*.parquet")):
        rows, blocks = parquet.checked(path, where)
        facts = path.stat()
        first = 1 + int(path.stem.partition("-")[2]) * _STORED_ROWS
        made.append(
            Input(
                name,
                str(path),
                "parquet",
                facts.st_size,
                files.sha256(path),
                str(known["origin"]),
                rows,
                first,
                facts.st_mtime_ns,
                tuple(blocks),
            )
        )
    return made


def _loaded(source: Mapping[str, Any], where: str) -> tuple[str, Iterator[Any]]:
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
    return origin, dataset.with_format("arrow").iter(_ROWS)


def _write(tables: Iterator[Any], folder: Path, where: str, limit: int | None) -> None:
    import pyarrow.parquet as pq

    writer: Any = None
    rows = 0
    for table in tables:
        if rows % _STORED_ROWS == 0:
            if writer is not None:
                writer.close()
            path = folder / f"part-{rows // _STORED_ROWS:05d}.parquet"
            writer = pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
        rows += len(table)
        if limit is not None and rows >= limit:
            break
    if writer is None:
        raise DataError(f"{where}: has no rows")
    writer.close()
