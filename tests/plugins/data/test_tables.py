"""Sources of Delta, of Iceberg and in the hub's own form: real tables, read back."""

import json
import sys
import time
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from plugins.data import output
from plugins.data.errors import DataError
from plugins.data.launcher import prepared
from tests.plugins.data import lake
from tests.plugins.data.kit import qa, rows, run

ROWS = [qa("q1", "a1", n=1), qa("q2", "a2", n=2), qa("q3", None, n=3)]


@pytest.fixture
def iceberg(tmp_path):
    """Make a table of rows in a catalog of its own."""
    pytest.importorskip("pyiceberg")
    pytest.importorskip("sqlalchemy")
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog("c", uri="sqlite://", warehouse=f"file://{tmp_path}")
    catalog.create_namespace("db")

    def made(records: list[dict]):
        first = pa.Table.from_pylist(records)
        table = catalog.create_table("db.t", schema=first.schema)
        table.append(first)
        return table

    return made


@pytest.mark.long
def test_a_dataset_of_the_hub(tmp_path, duck, monkeypatch):
    """A dataset's folder, which the hub's own library loads as it loads one of the hub."""
    from datasets import Dataset

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "helpdesk"
    (folder / "data").mkdir(parents=True)
    Dataset.from_list(ROWS).to_parquet(folder / "data" / "train-00000-of-00001.parquet")
    Dataset.from_list(ROWS[:1]).to_parquet(folder / "data" / "test-00000-of-00001.parquet")
    source = {"repository": str(folder), "type": "hub", "name": "desk"}
    source |= {"format": "qa", "keep": {"n": "whole"}}
    made = run(tmp_path, [], duck, sources=[source], max_bad_share=0.5)
    found = [(row["prompt"], row["answer"], row["n"]) for row in rows(made, duck)]
    assert found == [("q1", "a1", 1), ("q2", "a2", 2)]
    assert len(made.bad) == 1 and "'answer' is null" in made.bad[0]["reason"]
    assert "helpdesk@main train" in made.inputs[0].origin
    # The copy is removed at the end, so that a row leads to the dataset itself.
    one = prepared.PreparedSet("desk", tmp_path, {}, {"inputs": [made.inputs[0].record()]})
    assert prepared.origin(one, 2) == f"row 2 of {made.inputs[0].origin}"
    test = run(tmp_path, [], duck, work="test", sources=[{**source, "split": "test"}])
    assert test.rows.count == 1
    with pytest.raises(DataError, match=r"split dev\) cannot be loaded"):
        run(tmp_path, [], duck, work="other", sources=[{**source, "split": "dev"}])


def prompts(made, duck) -> list[str]:
    return sorted(row["prompt"] for row in rows(made, duck))


def test_versions_of_a_delta_table(tmp_path, duck):
    deltalake = pytest.importorskip("deltalake")
    path, between = tmp_path / "table", []
    for number in range(3):
        table = pa.Table.from_pylist([qa(f"q{number}", "a")])
        deltalake.write_deltalake(str(path), table, mode="append" if number else "error")
        time.sleep(0.01)
        between.append(datetime.now(UTC))
        time.sleep(0.01)
    source = {"path": "table", "type": "delta"}
    made = run(tmp_path, [], duck, source=source)
    assert prompts(made, duck) == ["q0", "q1", "q2"]
    # The rows lead to the table's own files.
    assert all(each.file.startswith(str(path)) and each.mtime_ns == 0 for each in made.inputs)
    for asked in ({"version": 1}, {"timestamp": between[1].isoformat()}):
        made = run(tmp_path, [], duck, work="-".join(asked), source={**source, **asked})
        assert prompts(made, duck) == ["q0", "q1"]
        assert made.inputs[0].origin.endswith("table, version 1")
    with pytest.raises(DataError, match=r"cannot be read as a Delta table at version=9: "):
        run(tmp_path, [], duck, work="none", source={**source, "version": 9})
    with pytest.raises(DataError, match=r"at timestamp=2020-01-01: its first version is of 2"):
        run(tmp_path, [], duck, work="none", source={**source, "timestamp": "2020-01-01"})
    with pytest.raises(DataError, match="nothing is not a table of Delta"):
        run(tmp_path, [], duck, work="none", source={**source, "path": "nothing"})
    with pytest.raises(DataError, match=rf"{path} is a table: set path={path} and type=delta"):
        run(tmp_path, [], duck, work="none", source={"path": "table"})
    # A file that vacuum has removed.
    source = {**source, "keep": {"answer": "text"}, "format": "text", "columns": {"text": "answer"}}
    next(path.glob("*.parquet")).unlink()
    with pytest.raises(
        DataError, match=r"cannot be read: .*: run it on the table's newest version"
    ):
        run(tmp_path, [], duck, work="gone", source=source)


def test_partitions_and_later_columns_of_a_delta_table(tmp_path, duck):
    deltalake = pytest.importorskip("deltalake")
    path = str(tmp_path / "table")
    kinds = ["x y/z", "ü%20", None]
    first = pa.Table.from_pylist([qa(f"q{n}", "a", kind=kind) for n, kind in enumerate(kinds)])
    deltalake.write_deltalake(path, first, partition_by=["kind"])
    later = pa.Table.from_pylist([qa("new", "a", kind="x y/z", score=0.5)])
    deltalake.write_deltalake(path, later, mode="append", schema_mode="merge")
    source = {"path": "table", "type": "delta", "keep": {"kind": "text", "score": "number"}}
    wanted = {("q0", "x y/z", None), ("q1", "ü%20", None), ("q2", None, None)}
    bad = pa.Table.from_pylist([qa("", "a", kind="x y/z", score=0.5)])
    deltalake.write_deltalake(path, bad, mode="append")
    made = run(tmp_path, [], duck, source=source, max_bad_share=0.5)
    found = {(each["prompt"], each["kind"], each["score"]) for each in rows(made, duck)}
    assert found == wanted | {("new", "x y/z", 0.5)}
    assert [bad["reason"] for bad in made.bad] == ["'question' is empty"]


@pytest.mark.parametrize("mode", ["name", "id"])
def test_deleted_rows_and_renamed_columns_of_a_delta_table(tmp_path, duck, mode):
    pytest.importorskip("deltalake")
    turn = {"type": "struct", "fields": [lake.string("content", 4), lake.string("role", 3)]}
    chat = {"type": "array", "elementType": turn, "containsNull": True}
    fields = [lake.mapped("messages", chat, 1), lake.mapped("day", "integer", 2)]
    fields += [lake.mapped("later", "double", 5)]

    def file(texts: list[str]) -> pa.Table:
        numbers = {"role": b"3", "content": b"4"}
        parts = [
            pa.field(f"c-{number.decode()}", pa.string(), metadata={"PARQUET:field_id": number})
            for number in numbers.values()
        ]
        turns = [[{"c-3": "user", "c-4": t}, {"c-3": "assistant", "c-4": "a"}] for t in texts]
        kind = pa.list_(pa.struct(parts))
        one = pa.field("c-1", kind, metadata={"PARQUET:field_id": "1"})
        return pa.table([pa.array(turns, kind)], schema=pa.schema([one]))

    texts = [f"q{n}" for n in range(50)]
    gone = {"deletionVector": lake.deletion_vector([0, 7, 49])}
    days = [{"partitionValues": {"c-2": str(day)}} for day in (1, 2)]
    files = [(file(texts), {**days[0], **gone}), (file(["other"]), days[1])]
    lake.write(tmp_path / "table", files, fields, ("day",), mode=mode)
    source = {"path": "table", "type": "delta", "format": "messages"}
    source["keep"] = {"day": "whole", "later": "number"}
    made = run(tmp_path, [], duck, source=source)
    left = [n for n in range(50) if n not in (0, 7, 49)]
    found = {row["_id"]: (row["prompt"], row["day"], row["later"]) for row in rows(made, duck)}
    # Deleted rows keep their numbers.
    assert found == {n + 1: (f"q{n}", 1, None) for n in left} | {(1 << 40) + 1: ("other", 2, None)}
    assert [each.rows for each in made.inputs] == [47, 1]


def test_what_is_not_read_of_a_table_is_named(tmp_path, duck):
    pytest.importorskip("deltalake")
    fields = [lake.string("question", 1), lake.string("answer", 2)]
    lake.write(tmp_path / "table", [], fields, features=("variantType",))
    with pytest.raises(DataError, match=r"table.*variantType") as error:
        run(tmp_path, [], duck, source={"path": "table", "type": "delta"})
    assert len(error.value.faults) == 1
    lake.write(tmp_path / "empty", [], fields)
    with pytest.raises(DataError, match=r"source 'empty': the table has no rows"):
        run(tmp_path, [], duck, source={"path": "empty", "type": "delta"})


def test_snapshots_and_renamed_columns_of_iceberg(tmp_path, duck, iceberg):
    from pyiceberg.types import DoubleType

    table = iceberg([{"q": "q0", "answer": "a0", "n": 1}])
    one = table.current_snapshot()
    with table.update_schema() as update:
        update.rename_column("q", "question")
    with table.update_schema() as update:
        # A new column must not be taken for the one that had its name.
        update.add_column("q", DoubleType())
    table.append(pa.Table.from_pylist([{"question": "q1", "answer": "a1", "n": 2, "q": 0.5}]))
    source = {"path": str(table.metadata_location), "type": "iceberg"}
    source["keep"] = {"n": "whole", "q": "number"}
    # The table's folder is enough: its newest metadata counts.
    folder = table.location().removeprefix("file://")
    for number, path in enumerate((source["path"], folder)):
        made = run(tmp_path, [], duck, work=f"w{number}", source={**source, "path": path})
        found = sorted((row["prompt"], row["n"], row["q"]) for row in rows(made, duck))
        assert found == [("q0", 1, None), ("q1", 2, 0.5)]
        assert "snapshot" in made.inputs[0].origin
    with pytest.raises(DataError, match="nothing is not a table of Iceberg"):
        run(tmp_path, [], duck, work="none", source={**source, "path": "nothing"})
    moment = datetime.fromtimestamp(one.timestamp_ms / 1000, UTC)
    for asked in ({"version": one.snapshot_id}, {"timestamp": moment}):
        old = {**source, **asked, "columns": {"question": "q"}, "keep": {"n": "whole"}}
        made = run(tmp_path, [], duck, work="-".join(asked), source=old)
        assert prompts(made, duck) == ["q0"]
    with pytest.raises(DataError, match=r"Iceberg table at version=5: there is no snapshot 5"):
        run(tmp_path, [], duck, work="none", source={**source, "version": 5})


def with_deletes(table, folder, rows_gone: list[int], content) -> str:
    """Commit a delete file for a table's only data file, as another engine would; return metadata.

    content: positions, or equality, which is refused.
    """
    from pyiceberg.manifest import (
        DataFile,
        FileFormat,
        ManifestContent,
        ManifestEntry,
        ManifestEntryStatus,
        ManifestWriterV2,
        write_manifest_list,
    )
    from pyiceberg.typedef import Record

    class Deletes(ManifestWriterV2):
        def content(self) -> ManifestContent:
            return ManifestContent.DELETES

        @property
        def _meta(self) -> dict[str, str]:
            return {**super()._meta, "content": "deletes"}

    (task,) = table.scan().plan_files()
    deletes = folder / "deletes.parquet"
    pairs = {"file_path": [task.file.file_path] * len(rows_gone), "pos": rows_gone}
    pq.write_table(pa.table(pairs), deletes)
    size, one = deletes.stat().st_size, table.current_snapshot()
    file = DataFile.from_args(
        content=content,
        file_path=f"file://{deletes}",
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=len(rows_gone),
        file_size_in_bytes=size,
    )
    added = ManifestEntry.from_args(
        status=ManifestEntryStatus.ADDED, snapshot_id=7, sequence_number=2, data_file=file
    )
    output = table.io.new_output(f"file://{folder}/deletes.avro")
    with Deletes(table.spec(), table.schema(), output, 7, "null") as writer:
        writer.add_entry(added)
    manifests = [*one.manifests(table.io), writer.to_manifest_file()]
    listed = f"file://{folder}/list.avro"
    with write_manifest_list(2, table.io.new_output(listed), 7, one.snapshot_id, 2, "null") as out:
        out.add_manifests(manifests)
    metadata = json.loads(table.metadata.model_dump_json(by_alias=True, exclude_none=True))
    snapshot = {"snapshot-id": 7, "sequence-number": 2, "timestamp-ms": one.timestamp_ms + 1}
    snapshot |= {"manifest-list": listed, "summary": {"operation": "delete"}, "schema-id": 0}
    metadata["snapshots"].append(snapshot)
    metadata |= {"current-snapshot-id": 7, "last-sequence-number": 2, "refs": {}}
    path = folder / "9.metadata.json"
    path.write_text(json.dumps(metadata))
    return str(path)


def test_deleted_rows_of_iceberg(tmp_path, duck, iceberg):
    from pyiceberg.manifest import DataFileContent

    table = iceberg([qa(f"q{n}", "a") for n in range(20)])
    path = with_deletes(table, tmp_path, [0, 7, 19], DataFileContent.POSITION_DELETES)
    source = {"path": path, "type": "iceberg"}
    made = run(tmp_path, [], duck, source=source)
    left = [n for n in range(20) if n not in (0, 7, 19)]
    assert {row["_id"]: row["prompt"] for row in rows(made, duck)} == {n + 1: f"q{n}" for n in left}
    with_deletes(table, tmp_path, [0], DataFileContent.EQUALITY_DELETES)
    with pytest.raises(DataError, match=r"has equality deletes, .*: compact the table"):
        run(tmp_path, [], duck, work="equal", source=source)


def test_a_set_as_a_delta_table(tmp_path, duck):
    deltalake = pytest.importorskip("deltalake")
    table = pa.Table.from_pylist([qa(f"q{n}", "a", n=n) for n in range(40)])
    pq.write_table(table, tmp_path / "data.parquet")
    config = {"sources": [{"path": "data.parquet", "format": "qa", "keep": {"n": "whole"}}]}
    config |= {"output": {"format": "delta", "rows": "text"}}
    made = run(tmp_path, [{"split": {"train": 0.5, "test": 0.5}}], duck, **config)
    folder, card = output.write(config, made, duck, tmp_path / "set", tmp_path / "work")
    found = deltalake.DeltaTable(str(folder / "data"))
    rows_of = found.to_pyarrow_table().to_pylist()
    assert found.version() == 0 and {row["split"] for row in rows_of} == {"train", "test"}
    assert sorted(row["text"] for row in rows_of) == sorted(f"q{n}\na" for n in range(40))
    # It is the same files that a trainer reads.
    parts = {each["file"] for split in card["splits"].values() for each in split["files"]}
    assert {uri.rpartition("/data/")[2] for uri in found.file_uris()} == {p[5:] for p in parts}
    again = {"path": str(folder / "data"), "type": "delta", "format": "text"}
    made = run(tmp_path, [], duck, work="again", sources=[again])
    assert made.rows.count == 40


@pytest.mark.parametrize(("kind", "package"), [("delta", "deltalake"), ("iceberg", "pyiceberg")])
def test_a_missing_package_is_named(tmp_path, duck, monkeypatch, kind, package):
    for name in (package, f"{package}.table"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DataError, match=f"{package} is missing: bash setup.sh --with tables"):
        run(tmp_path, [], duck, source={"path": "table", "type": kind, "format": "qa"})
