"""Delta tables whose log is written by hand: features that deltalake reads and does not write."""

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_B85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def deletion_vector(rows: list[int]) -> dict[str, Any]:
    """An inline deletion vector of Delta: a 64-bit Roaring bitmap of one container, in Z85."""
    container = struct.pack("<IIHHI", 12346, 1, 0, len(rows) - 1, 16)
    container += struct.pack(f"<{len(rows)}H", *rows)
    whole = struct.pack("<IQI", 1681511377, 1, 0) + container
    padded = whole + bytes(-len(whole) % 4)
    text = base64.b85encode(padded).decode().translate(str.maketrans(_B85, _Z85))
    facts = {"storageType": "i", "pathOrInlineDv": text}
    return {**facts, "sizeInBytes": len(whole), "cardinality": len(rows)}


def string(name: str, number: int) -> dict[str, Any]:
    return mapped(name, "string", number)


def mapped(name: str, kind: Any, number: int) -> dict[str, Any]:
    """A field that files know as c-NUMBER."""
    known = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": f"c-{number}"}
    return {"name": name, "type": kind, "nullable": True, "metadata": known}


def write(
    folder: Path,
    files: list[tuple[pa.Table, dict[str, Any]]],
    fields: list[dict[str, Any]],
    partitions: tuple[str, ...] = (),
    features: tuple[str, ...] = ("columnMapping", "deletionVectors"),
    mode: str = "name",
) -> None:
    """Write a table of one version; files: rows, and further keys of the file's add action."""
    (folder / "_delta_log").mkdir(parents=True)
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7}
    protocol |= {"readerFeatures": features, "writerFeatures": features}
    schema = json.dumps({"type": "struct", "fields": fields})
    settings = {"delta.columnMapping.mode": mode} if "columnMapping" in features else {}
    meta = {"id": "1", "format": {"provider": "parquet", "options": {}}, "schemaString": schema}
    meta |= {"partitionColumns": partitions, "configuration": settings, "createdTime": 0}
    actions: list[dict[str, Any]] = [{"protocol": protocol}, {"metaData": meta}]
    for number, (table, more) in enumerate(files):
        path = folder / f"{number}.parquet"
        pq.write_table(table, path)
        add = {"path": path.name, "partitionValues": {}, "size": path.stat().st_size}
        add |= {"modificationTime": 0, "dataChange": True}
        actions.append({"add": {**add, "stats": json.dumps({"numRecords": len(table)}), **more}})
    text = "\n".join(json.dumps(action) for action in actions)
    (folder / "_delta_log" / f"{0:020d}.json").write_text(text)
