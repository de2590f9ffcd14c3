"""Reads sources into shards of the kit's rows: one task per block of a file.

A block's task writes its rows, and in another file the records that it could not read, with line
and reason. A row's id is its file's number and its line, which identify its record.
"""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import islice, repeat
from pathlib import Path
from typing import Any

from plugins.data import openers, parquet
from plugins.data.datarecipe import FORMATS
from plugins.data.errors import BadRow, DataError
from plugins.data.formats import reader, text_columns
from plugins.data.parquet import BATCH_ROWS
from plugins.data.recognisers import hidden, hidden_json
from runspec.files import parse_json
from runspec.prepared import ROW_BITS
from runspec.tables import separator

# The text after an unclosed quote is one field, which must not fill the memory.
_LONGEST_FIELD = 2**26
# Characters that are kept of a record that cannot be read.
_SHOWN = 300
BAD_SUFFIX = ".bad.jsonl"


def schema(keep: Mapping[str, str]) -> Any:
    """Return the Arrow schema of the kit's rows with the kept columns of all sources."""
    import pyarrow as pa

    kinds = {"text": pa.string(), "number": pa.float64(), "whole": pa.int64(), "flag": pa.bool_()}
    fixed = [("_id", pa.int64()), ("source", pa.string())]
    texts = [(name, pa.string()) for name in ("prompt", "answer", "messages", "rejected")]
    return pa.schema([*fixed, *texts, *((name, kinds[kind]) for name, kind in keep.items())])


def read_blocks(
    target: Path,
    source: Mapping[str, Any],
    blocks: Sequence[Mapping[str, Any]],
    bad: str,
    limit: int | None = None,
) -> None:
    """Write the rows of blocks as Parquet, and the bad ones as JSON lines.

    Args:
        source: name, format, columns, keep (of this source), all_keep (of all).
        blocks: file, number (of the input), type, and what openers need of that type.
        bad: the file for bad rows.
        limit: maximum number of records.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = schema(source["all_keep"])
    faulty: list[dict[str, Any]] = []
    with pq.ParquetWriter(target, names) as writer:
        for block in blocks:
            if limit is not None and limit <= 0:
                break
            try:
                if block["type"] == "parquet":
                    seen = _columns(writer, source, block, faulty, limit)
                else:
                    read = islice(_RECORDS[block["type"]](block), limit)
                    seen = _records(writer, source, block, read, faulty)
            except (pa.ArrowInvalid, OSError) as error:
                if getattr(error, "errno", None) and not isinstance(error, FileNotFoundError):
                    raise  # the disk's fault; a damaged page has no number
                reason = str(error).splitlines()[0].rstrip(".")
                raise DataError(
                    f"{block['file']}: cannot be read: {reason}: copy it again"
                ) from None
            limit = None if limit is None else limit - seen
    text = "".join(json.dumps(each) + "\n" for each in faulty)
    Path(bad).write_text(text, encoding="utf-8")


def _records(
    writer: Any,
    source: Mapping[str, Any],
    block: Mapping[str, Any],
    read: Iterable[tuple[int, Any, str]],
    bad: list[Any],
) -> int:
    """Write the rows of records, (line, record, fault) each; return how many records there were."""
    import pyarrow as pa

    start = block["number"] << ROW_BITS
    name, keep = source["name"], source["keep"]
    form = reader(source["format"], source["columns"])
    # CSV has no null: an empty field is read as null.
    no_null = block["type"] == "csv"
    rows: list[dict[str, Any]] = []
    count = 0

    def flush() -> None:
        if rows:
            writer.write_table(pa.Table.from_pylist(rows, schema=writer.schema))
            rows.clear()

    for line, record, fault in read:
        count += 1
        try:
            if fault:
                raise BadRow(fault)
            content = form(record)
            kept = {key: _kept(record, key, kind, no_null) for key, kind in keep.items()}
        except BadRow as why:
            shown = record if isinstance(record, str) else json.dumps(record, default=str)
            bad.append({"file": block["file"], "line": line, "reason": hidden(str(why))})
            bad[-1] |= {"source": name, "record": hidden_json(shown)[:_SHOWN]}
            continue
        rows.append({"_id": start + line, "source": name, **content._asdict(), **kept})
        if len(rows) >= BATCH_ROWS:
            flush()
    flush()
    return count


def _kept(record: Mapping[str, Any], name: str, kind: str, no_null: bool) -> Any:
    if name not in record:
        raise BadRow(f"has no column {name!r}, only {', '.join(map(str, record)) or 'none'}")
    value = record[name]
    if value is None or (value == "" and (no_null or kind != "text")):
        return None
    try:
        return _CONVERTED[kind](value)
    except (TypeError, ValueError, KeyError, OverflowError):
        raise BadRow(f"{name!r} is not of type {kind}: {hidden(str(value))[:40]!r}") from None


def _whole(value: Any) -> int:
    number = int(value)
    if isinstance(value, float | Decimal) and number != value:
        raise ValueError(value)
    if not -(2**63) <= number < 2**63:
        raise OverflowError(value)
    return number


def _text(value: Any) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode()
    if isinstance(value, bool | int | float | list | tuple | dict):
        value = json.dumps(value, ensure_ascii=False, default=str)
    text = str(value)
    # JSON's escapes can hold half of a surrogate pair, and no file can.
    text.encode()
    return text


_CONVERTED: Mapping[str, Callable[[Any], Any]] = {
    "number": float,
    "whole": _whole,
    "flag": lambda value: {"true": True, "1": True, "false": False, "0": False}[str(value).lower()],
    "text": _text,
}


def _json_lines(block: Mapping[str, Any]) -> Iterator[tuple[int, Any, str]]:
    encoding = str(block["encoding"])
    # Lines of other encodings come as UTF-8, and the mark is not part of a block.
    if encoding == "utf-8-sig" or not openers.ends_lines_as_ascii(encoding):
        encoding = "utf-8"
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
            record = parse_json(text)
        except ValueError as error:
            yield number, text, f"is not JSON: {error}"
            continue
        fault = "" if isinstance(record, dict) else "is JSON, but not an object"
        yield number, record, fault


def _json_array(block: Mapping[str, Any]) -> Iterator[tuple[int, Any, str]]:
    """The records of a JSON file that is one array; its line is the number of the record."""
    encoding = str(block["encoding"])
    try:
        content = parse_json(openers.whole(block).decode(encoding))
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
        raise DataError(f"{block['file']}: is JSON, but not an array of records: set type=jsonl")
    for number, record in enumerate(content, 1):
        yield number, record, "" if isinstance(record, dict) else "is not an object"


def _csv(block: Mapping[str, Any]) -> Iterator[tuple[int, Any, str]]:
    delimiter = separator(Path(str(block["file"])))
    encoding = str(block["encoding"])
    csv.field_size_limit(_LONGEST_FIELD)
    with openers.stream(str(block["file"])) as raw:
        text = io.TextIOWrapper(raw, encoding=encoding, newline="")
        rows = csv.reader(text, delimiter=delimiter)
        line = 1
        try:
            header = next(rows, [])
            line = rows.line_num + 1
            for row in rows:
                record = dict(zip(header, row, strict=False))
                wrong = f"has {len(row)} fields, the header {len(header)}"
                if row:
                    yield line, record, "" if len(row) == len(header) else wrong
                line = rows.line_num + 1
        except UnicodeError as error:
            raise DataError(
                f"{block['file']}, after line {rows.line_num}: is not {encoding} (byte "
                f"{getattr(error, 'start', 0)}): set encoding= of the source"
            ) from None
        except csv.Error as error:
            raise DataError(
                f"{block['file']}: the record that begins in line {line}: {error}: fix the file; "
                "a quote may be open"
            ) from None


# Each yields (line, record, fault) of a block; a record with a fault is its text.
_RECORDS: Mapping[str, Callable[[Mapping[str, Any]], Iterator[tuple[int, Any, str]]]] = {
    "jsonl": _json_lines,
    "json": _json_array,
    "csv": _csv,
}


def _columns(
    writer: Any,
    source: Mapping[str, Any],
    block: Mapping[str, Any],
    bad: list[Any],
    limit: int | None,
) -> int:
    """Write rows of Parquet; question and answer, or text, without a Python object per row."""
    import pyarrow as pa

    names = FORMATS[source["format"]] | {k: str(v) for k, v in source["columns"].items()}
    wanted = dict.fromkeys([*filter(None, names.values()), *source["keep"]])
    seen = 0
    for numbers, batch in parquet.batches(block, list(wanted)):
        if limit is not None:
            if seen >= limit:
                break
            numbers, batch = numbers[: limit - seen], batch.slice(0, limit - seen)
        seen += len(numbers)
        ids = pa.array(numbers + (block["number"] << ROW_BITS), pa.int64())
        if (plain := _plain(batch, ids, source, writer.schema)) is not None:
            writer.write_batch(plain)
            continue
        read = zip(numbers.tolist(), _python_rows(batch, source["keep"]), repeat(""), strict=False)
        _records(writer, source, block, read, bad)
    return seen


def _python_rows(batch: Any, keep: Mapping[str, str]) -> list[dict[str, Any]]:
    """The rows of a batch; times and dates that are kept are texts as Arrow writes them."""
    import pyarrow as pa

    for place, field in enumerate(batch.schema):
        if field.name in keep and pa.types.is_temporal(field.type):
            text = batch.column(place).cast(pa.string())
            batch = batch.set_column(place, field.name, text)
    rows: list[dict[str, Any]] = batch.to_pylist()
    return rows


# Arrow's casts of these types give what _kept gives, so that it does not matter which one is used.
_SAME = {
    "text": ("string", "large_string"),
    "number": ("double", "float", "int64", "int32", "int16", "int8"),
    "whole": ("int64", "int32", "int16", "int8"),
    "flag": ("bool",),
}


def _plain(batch: Any, ids: Any, source: Mapping[str, Any], names: Any) -> Any:
    """Return the rows of a batch whose texts are all there and not empty, else None."""
    import pyarrow as pa
    import pyarrow.compute as pc

    texts = text_columns(source)
    kinds = {**dict.fromkeys(texts.values(), "text"), **source["keep"]}
    there = {field.name: str(field.type) for field in batch.schema}
    if not texts or any(there.get(name) not in _SAME[kind] for name, kind in kinds.items()):
        return None
    for name in texts.values():
        length = pc.utf8_length(pc.utf8_trim_whitespace(batch.column(name)))
        if not pc.all(pc.greater(pc.fill_null(length, 0), 0)).as_py():
            return None
    known = {"_id": ids, "source": pa.repeat(pa.scalar(source["name"]), len(batch))}
    known |= {name: batch.column(column) for name, column in texts.items()}
    known |= {name: batch.column(name) for name in source["keep"]}
    # A whole number may be too large to be exact as a fraction, as in Python.
    columns = [
        known[each.name].cast(each.type, safe=False)
        if each.name in known
        else pa.nulls(len(batch), each.type)
        for each in names
    ]
    return pa.record_batch(columns, schema=names)
