"""Finds the files of the sources, and fetches what is no file: the hub, databases, tables."""

import glob
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datakit import openers
from datakit.engines.tasks import Task
from datakit.errors import DataError
from datakit.ingest import BAD_SUFFIX
from runspec import files
from runspec.datarecipe import SUFFIXES, source_name, source_type

_SUFFIXES = tuple(SUFFIXES)
_STORED = ("hub", "sql", "delta", "iceberg")
# Rows of a database or a table in one stored file.
_STORED_ROWS = 200_000


@dataclass(frozen=True)
class Input:
    """One file of a source, as it was when it was first read.

    number: its place in row ids. origin: what it was fetched from, if it is a copy.
    """

    number: int
    source: str
    file: str
    type: str
    bytes: int
    mtime_ns: int
    sha256: str
    blocks: tuple[Mapping[str, Any], ...]
    origin: str = ""

    @property
    def rows(self) -> int:
        """The rows of a Parquet file, as its footer says."""
        import pyarrow.parquet as pq

        return int(pq.read_metadata(self.file).num_rows)

    def record(self) -> dict[str, Any]:
        """What the lineage says of it."""
        found = asdict(self)
        del found["blocks"]
        return found


def find(
    config: Mapping[str, Any], base: Path, store: Path, threads: int, say: Callable[[str], None]
) -> list[Input]:
    """Return the files of all sources, each read once for its hash.

    Args:
        base: where relative paths count from.
        store: a folder for copies of what is no file.

    Raises:
        DataError: a source is missing, empty or of no known type; all faults at once.
    """
    faults: list[str] = []
    found: list[tuple[Mapping[str, Any], str, Path, str, str]] = []
    for number, source in enumerate(config["sources"]):
        name = source_name(source, number)
        where = f"source {name!r}"
        try:
            kind = source_type(source)
            if kind in _STORED:
                origin, paths = _stored(source, kind, base, store / name, where, say)
                found += [(source, name, path, "parquet", origin) for path in paths]
                continue
            paths = matches(source, base, where)
            for path in paths:
                kind = source_type(source, path)
                if kind is None:
                    raise DataError(
                        f"{where}: {path}: cannot tell its type: set type= of the source"
                    )
                if path.stat().st_size == 0:
                    raise DataError(f"{where}: {path} is empty: remove it, or write rows to it")
                if kind == "parquet":
                    openers.check_parquet(path, where)
                found.append((source, name, path, kind, ""))
        except DataError as error:
            faults += error.faults
        except OSError as error:
            faults.append(f"{where}: {error.filename or ''}: {error.strerror or error}")
    if faults:
        raise DataError(*faults)

    def survey(item: tuple[int, tuple[Mapping[str, Any], str, Path, str, str]]) -> Input:
        number, (_, name, path, kind, origin) = item
        facts = path.stat()
        cut = kind == "jsonl" and path.suffix in _SUFFIXES
        digest, blocks = openers.survey(path, cut)
        return Input(
            number,
            name,
            str(path),
            kind,
            facts.st_size,
            facts.st_mtime_ns,
            digest,
            tuple(blocks),
            origin,
        )

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(survey, enumerate(found)))


def matches(source: Mapping[str, Any], base: Path, where: str) -> list[Path]:
    """Return the files of a path: a file, a folder of known files, or a pattern."""
    text = os.path.expanduser(str(source["path"]))
    path = Path(text) if os.path.isabs(text) else base / text
    if path.is_dir():
        packed = ("", ".gz", ".bz2", ".xz", ".zst")
        names = tuple(suffix + end for suffix in _SUFFIXES for end in packed)
        found = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(names))
        found = [p for p in found if not p.name.startswith((".", "_"))]
        if not found:
            raise DataError(f"{where}: the folder {path} holds no file of {', '.join(_SUFFIXES)}")
        return found
    if path.is_file():
        return [path]
    found = sorted(Path(each) for each in glob.glob(str(path), recursive=True))
    found = [each for each in found if each.is_file()]
    if not found:
        what = "no file fits the pattern" if glob.has_magic(str(path)) else "there is no file"
        raise DataError(f"{where}: {what} {path}: fix path of the source")
    return found


def tasks(
    config: Mapping[str, Any],
    inputs: Sequence[Input],
    folder: Path,
    all_keep: Mapping[str, str],
    limit: int | None,
) -> list[Task]:
    """Return the tasks that read the inputs, in the order of their rows.

    limit: read so many rows of each source at most.
    """
    made: list[Task] = []
    by_name = {source_name(each, n): each for n, each in enumerate(config["sources"])}
    for each in inputs:
        source = by_name[each.source]
        caps = [cap for cap in (limit, source.get("max_rows")) if cap is not None]
        options = {
            "name": each.source,
            "format": source["format"],
            "columns": dict(source.get("columns") or {}),
            "keep": dict(source.get("keep") or {}),
            "all_keep": dict(all_keep),
            "encoding": source.get("encoding"),
        }
        for block in each.blocks[: 1 if caps else None]:
            target = folder / f"part-{len(made):05d}.parquet"
            whole = {**block, "file": each.file, "number": each.number, "type": each.type}
            whole["bad"] = str(folder / f"_{target.stem}{BAD_SUFFIX}")
            if caps:
                whole["max_rows"] = min(caps)
            options_of = {"source": options, "block": whole}
            made.append(Task("datakit.ingest:read_block", str(target), options_of))
    return made


def unchanged(inputs: Sequence[Input]) -> None:
    """Raise DataError for files that were changed since they were first read."""
    faults = []
    for each in inputs:
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


# What is no file ------------------------------------------------------------------------------


def _stored(
    source: Mapping[str, Any],
    kind: str,
    base: Path,
    folder: Path,
    where: str,
    say: Callable[[str], None],
) -> tuple[str, list[Path]]:
    """Copy a table into Parquet files, once; return where it is from, and the files."""
    note = folder / "_origin.json"
    asked = {key: source.get(key) for key in ("path", "repository", "split", "url", "query")}
    asked = {**asked, "kind": kind}
    known = files.read_json_or_none(note)
    if not (isinstance(known, dict) and known.get("asked") == asked):
        say(f"{where}: fetching its rows once")
        temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            origin, batches = _FETCH[kind](source, base, where)
            _write(batches, temporary, where)
            files.write_json(temporary / note.name, {"asked": asked, "origin": origin})
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        known = files.read_json(note)
    return str(known["origin"]), sorted(folder.glob("*.parquet"))


def _write(batches: Any, folder: Path, where: str) -> None:
    import pyarrow.parquet as pq

    writer, rows, number = None, 0, 0
    for batch in batches:
        if writer is None:
            writer = pq.ParquetWriter(folder / f"part-{number:05d}.parquet", batch.schema)
        writer.write_batch(batch)
        rows += len(batch)
        if rows >= _STORED_ROWS * (number + 1):
            writer.close()
            writer, number = None, number + 1
    if writer is not None:
        writer.close()
    if rows == 0:
        raise DataError(f"{where}: holds no row")


def _missing(package: str, where: str) -> DataError:
    known = package.partition(".")[0] in ("deltalake", "pyiceberg")
    how = "bash setup.sh --with tables" if known else f".venv/bin/pip install {package}"
    return DataError(f"{where}: the package {package} is missing: {how}")


def _from_sql(source: Mapping[str, Any], base: Path, where: str) -> tuple[str, Any]:
    import ibis

    url = os.path.expandvars(str(source["url"]))
    shown = url.rpartition("@")[2] or url
    try:
        cursor = ibis.connect(url).raw_sql(str(source["query"]))
        return f"{shown}: {source['query']}", _fetched(cursor)
    except ImportError as error:
        raise _missing(error.name or "for this database", where) from None
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        reason = reason.replace(url, shown)
        raise DataError(f"{where}: the database does not answer the query: {reason}") from None


def _fetched(cursor: Any) -> Any:
    """The rows of a database's cursor as Arrow batches; types are those of the first ones."""
    import pyarrow as pa

    names, schema = [column[0] for column in cursor.description], None
    while rows := cursor.fetchmany(10_000):
        columns = list(zip(*rows, strict=True))
        made = pa.table([list(column) for column in columns], names=names)
        # A column that is null so far is taken as text.
        wanted = [f.with_type(pa.string()) if pa.types.is_null(f.type) else f for f in made.schema]
        schema = schema or pa.schema(wanted)
        yield from made.cast(schema).to_batches()


def _from_hub(source: Mapping[str, Any], base: Path, where: str) -> tuple[str, Any]:
    from datasets import load_dataset

    name, _, revision = str(source["repository"]).partition("@")
    split = str(source.get("split") or "train")
    try:
        found = load_dataset(name, split=split, revision=revision or None)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(
            f"{where}: {name} (split {split}) cannot be loaded: {reason}: compute nodes often "
            "reach "
            "no hub; run it once on the login node"
        ) from None
    checksums = sorted(found.info.download_checksums or {})
    table = found.with_format("arrow")
    batches = (batch for piece in table.iter(10_000) for batch in piece.to_batches())
    return f"{name}@{revision or 'main'} {split} {' '.join(checksums[:3])}".strip(), batches


def _from_delta(source: Mapping[str, Any], base: Path, where: str) -> tuple[str, Any]:
    try:
        from deltalake import DeltaTable
    except ImportError:
        raise _missing("deltalake", where) from None
    path = base / os.path.expanduser(str(source["path"]))
    try:
        table = DeltaTable(str(path))
        import pyarrow as pa

        reader = pa.RecordBatchReader.from_stream(table.to_pyarrow_dataset().scanner().to_reader())
        return f"{path}, version {table.version()}", reader
    except ImportError as error:
        raise _missing(error.name or "deltalake", where) from None
    except Exception as error:
        raise DataError(
            f"{where}: {path} is no Delta table: {str(error).splitlines()[0]}"
        ) from None


def _from_iceberg(source: Mapping[str, Any], base: Path, where: str) -> tuple[str, Any]:
    try:
        from pyiceberg.table import StaticTable
    except ImportError:
        raise _missing("pyiceberg", where) from None
    path = str(source["path"])
    if "://" not in path:
        path = str(base / os.path.expanduser(path))
    try:
        table = StaticTable.from_metadata(_newest_metadata(path))
        snapshot = table.current_snapshot()
        batches = table.scan().to_arrow_batch_reader()
        return f"{path}, snapshot {snapshot.snapshot_id if snapshot else 'none'}", batches
    except Exception as error:
        raise DataError(
            f"{where}: {path} is no Iceberg table: {str(error).splitlines()[0]}"
        ) from None


def _newest_metadata(path: str) -> str:
    """Return the metadata file of an Iceberg table, of which the folder or that file is given."""
    folder = Path(path) / "metadata"
    if not folder.is_dir():
        return path
    # v3.metadata.json, or 00003-<id>.metadata.json.
    found = {
        int(re.sub(r"\D.*", "", p.name.lstrip("v")) or 0): p for p in folder.glob("*.metadata.json")
    }
    return str(found[max(found)]) if found else path


_FETCH = {"sql": _from_sql, "hub": _from_hub, "delta": _from_delta, "iceberg": _from_iceberg}
