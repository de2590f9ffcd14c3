"""Reads sources into shards of rows of the kit: one task per block of a file.

A block's task writes its rows, and beside them the records that it could not read, with line and
reason. A row's id is its file's number and its line, so that each row leads back to its record.
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from datakit import openers
from datakit.errors import BadRow, DataError
from datakit.formats import Content, reader
from runspec.prepared import ROW_BITS

_BATCH = 20000
# What is kept of a record that cannot be read.
_SHOWN = 300
BAD_SUFFIX = ".bad.jsonl"


def schema(keep: Mapping[str, str]) -> Any:
    """Return the Arrow schema of the kit's rows with the kept columns of all sources."""
    import pyarrow as pa

    kinds = {"text": pa.string(), "number": pa.float64(), "whole": pa.int64(), "flag": pa.bool_()}
    fixed = [("_id", pa.int64()), ("source", pa.string())]
    texts = [(name, pa.string()) for name in ("prompt", "answer", "messages", "rejected")]
    return pa.schema([*fixed, *texts, *((name, kinds[kind]) for name, kind in keep.items())])


def read_block(target: Path, source: Mapping[str, Any], block: Mapping[str, Any]) -> None:
    """Write the rows of one block as Parquet, and the bad ones as JSON lines beside it.

    Args:
        source: name, format, columns, keep (of this source), all_keep (of all), encoding.
        block: file, number (of the file), type, and begin, end (bytes) and line of a text block.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = schema(source["all_keep"])
    start = block["number"] << ROW_BITS
    bad: list[dict[str, Any]] = []
    try:
        with pq.ParquetWriter(target, names) as writer:
            if block["type"] == "parquet":
                _columns(writer, source, block, start, bad)
            else:
                _records(writer, source, block, start, bad)
    except (pa.ArrowInvalid, OSError) as error:
        if getattr(error, "errno", None):
            raise  # the disk's fault; a damaged page has no number
        reason = str(error).splitlines()[0].rstrip(".")
        raise DataError(f"{block['file']}: cannot be read: {reason}: copy it again") from None
    path = Path(str(block["bad"]))
    path.write_text("".join(json.dumps(each) + "\n" for each in bad), encoding="utf-8")


def _records(
    writer: Any, source: Mapping[str, Any], block: Mapping[str, Any], start: int, bad: list[Any]
) -> None:
    import pyarrow as pa

    read = reader(source["format"], source["columns"])
    rows: dict[str, list[Any]] = {name: [] for name in writer.schema.names}

    def flush() -> None:
        if rows["_id"]:
            writer.write_table(pa.table(rows, schema=writer.schema))
            for values in rows.values():
                values.clear()

    for line, record, fault in records(block, source.get("encoding") or "utf-8"):
        try:
            if fault:
                raise BadRow(fault)
            content = read(record)
            kept = {name: _kept(record, name, kind) for name, kind in source["keep"].items()}
        except BadRow as why:
            shown = record if isinstance(record, str) else json.dumps(record, default=str)
            bad.append({"file": block["file"], "line": line, "reason": str(why)})
            bad[-1] |= {"source": source["name"], "record": shown[:_SHOWN]}
            continue
        _add(rows, start + line, source["name"], content, kept)
        if len(rows["_id"]) >= _BATCH:
            flush()
    flush()


def _add(
    rows: dict[str, list[Any]], key: int, source: str, content: Content, kept: Mapping[str, Any]
) -> None:
    rows["_id"].append(key)
    rows["source"].append(source)
    for name, value in content._asdict().items():
        rows[name].append(value)
    for name in list(rows)[6:]:
        rows[name].append(kept.get(name))


def _kept(record: Mapping[str, Any], name: str, kind: str) -> Any:
    if name not in record:
        raise BadRow(f"has no column {name!r}, only {', '.join(map(str, record)) or 'none'}")
    value = record[name]
    if value is None or value == "":
        return None
    try:
        if kind == "number":
            return float(value)
        if kind == "whole":
            return int(value)
        if kind == "flag":
            known = {"true": True, "1": True, "false": False, "0": False}
            return known[str(value).lower()]
    except (TypeError, ValueError, KeyError):
        raise BadRow(f"{name!r} is no {kind}: {str(value)[:40]!r}") from None
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def records(block: Mapping[str, Any], encoding: str) -> Iterator[tuple[int, Any, str]]:
    """Yield (line, record, fault) of a block; a record with a fault is its text."""
    if block["type"] == "jsonl":
        yield from _json_lines(block, encoding)
    elif block["type"] == "json":
        yield from _json_array(block, encoding)
    elif block["type"] == "csv":
        yield from _csv(block, encoding)
    else:
        for number, record in enumerate(openers.rows_of(block), 1):
            yield number, record, ""


def _json_lines(block: Mapping[str, Any], encoding: str) -> Iterator[tuple[int, Any, str]]:
    for number, line in enumerate(openers.lines(block), int(block.get("line", 1))):
        if not line.strip():
            continue
        try:
            text = line.decode(encoding)
        except UnicodeDecodeError as error:
            shown = line.decode(encoding, errors="replace")
            yield number, shown, f"is not {encoding} (byte {error.start}): set encoding="
            continue
        try:
            record = json.loads(text)
        except ValueError as error:
            yield number, text, f"is not JSON: {error}"
            continue
        except RecursionError:
            yield number, text[:_SHOWN], "is JSON that is nested too deep"
            continue
        fault = "" if isinstance(record, dict) else "is JSON, but no object"
        yield number, record, fault


def _json_array(block: Mapping[str, Any], encoding: str) -> Iterator[tuple[int, Any, str]]:
    """The records of a JSON file that is one array; its line is the number of the record."""
    try:
        content = json.loads(openers.whole(block).decode(encoding))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{block['file']}: is not {encoding} (byte {error.start}): set encoding="
        ) from None
    except ValueError as error:
        raise DataError(
            f"{block['file']}: is not JSON: {error}: fix it, or set type=jsonl if each line is "
            "a record"
        ) from None
    if not isinstance(content, list):
        raise DataError(f"{block['file']}: is JSON, but no array of records: set type=jsonl")
    for number, record in enumerate(content, 1):
        yield number, record, "" if isinstance(record, dict) else "is no object"


def _csv(block: Mapping[str, Any], encoding: str) -> Iterator[tuple[int, Any, str]]:
    delimiter = "\t" if ".tsv" in Path(str(block["file"])).suffixes else ","
    with openers.stream(str(block["file"])) as raw:
        text = io.TextIOWrapper(raw, encoding=encoding, newline="")
        rows = csv.reader(text, delimiter=delimiter)
        try:
            header = next(rows, [])
            line = rows.line_num + 1
            for row in rows:
                record = dict(zip(header, row, strict=False))
                wrong = f"has {len(row)} fields, the header {len(header)}"
                if row:
                    yield line, record, "" if len(row) == len(header) else wrong
                line = rows.line_num + 1
        except UnicodeDecodeError as error:
            raise DataError(
                f"{block['file']}, after line {rows.line_num}: is not {encoding} (byte "
                f"{error.start}): set encoding= of the source"
            ) from None
        except csv.Error as error:
            raise DataError(
                f"{block['file']}, line {rows.line_num}: {error}: fix the file"
            ) from None


def _columns(
    writer: Any, source: Mapping[str, Any], block: Mapping[str, Any], start: int, bad: list[Any]
) -> None:
    """Rows of a Parquet file; question and answer, or text, without a Python object per row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    fast = {"qa": ("question", "answer"), "text": (None, "text")}.get(source["format"])
    with pq.ParquetFile(block["file"]) as file:
        number = 1
        limit = block.get("max_rows")
        for batch in file.iter_batches(batch_size=_BATCH):
            if limit is not None and number > limit:
                return
            batch = batch if limit is None else batch.slice(0, limit - number + 1)
            ids = pa.array(range(start + number, start + number + len(batch)), pa.int64())
            number += len(batch)
            made = None
            if fast is not None and _is_plain(batch, source, fast):
                made = _plain_batch(batch, ids, source, fast, writer.schema)
            if made is not None:
                writer.write_batch(made)
                continue
            slow = {**block, "type": "batch", "rows": batch.to_pylist()}
            slow["offset"] = number - len(batch) - 1
            _slow_batch(writer, source, slow, start, bad)


def _is_plain(batch: Any, source: Mapping[str, Any], fast: tuple[str | None, str]) -> bool:
    """Whether all texts of a batch are there and not empty, so that no row needs a look."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for name in filter(None, fast):
        column = str(source["columns"].get(name, name))
        if column not in batch.schema.names or batch.column(column).null_count:
            return False
        values = batch.column(column)
        if not pa.types.is_string(values.type) and not pa.types.is_large_string(values.type):
            return False
        if pc.any(pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(values)), 0)).as_py():
            return False
    return all(name in batch.schema.names for name in source["keep"])


def _plain_batch(
    batch: Any, ids: Any, source: Mapping[str, Any], fast: tuple[str | None, str], names: Any
) -> Any:
    import pyarrow as pa

    count = len(batch)

    def text(name: str | None) -> Any:
        if name is None:
            return pa.nulls(count, pa.string())
        return batch.column(str(source["columns"].get(name, name))).cast(pa.string())

    nothing = pa.nulls(count, pa.string())
    made = [ids, pa.repeat(pa.scalar(source["name"]), count), text(fast[0]), text(fast[1])]
    made += [nothing, nothing]
    for field in list(names)[6:]:
        if field.name not in source["keep"]:
            made.append(pa.nulls(count, field.type))
            continue
        try:
            made.append(batch.column(field.name).cast(field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return None
    return pa.record_batch(made, schema=names)


def _slow_batch(
    writer: Any, source: Mapping[str, Any], block: dict[str, Any], start: int, bad: list[Any]
) -> None:
    before = len(bad)
    _records(writer, source, block, start + block["offset"], bad)
    for each in bad[before:]:
        each["line"] += block["offset"]
