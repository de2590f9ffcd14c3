"""Sources that a library reads: a dataset as the Hub has it, Delta tables, queries of databases."""

import json
import sqlite3
import sys

import pyarrow as pa
import pytest

from plugins.data import copies
from plugins.data.errors import DataError
from plugins.data.launcher import prepared
from tests.plugins.data.kit import chat, qa, rows, run

ROWS = [qa("q1", "a1", n=1), qa("q2", "a2", n=2), qa("q3", None, n=3)]


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
    test = run(tmp_path, [], duck, work="test", sources=[{**source, "split": "test"}])
    assert test.rows.count == 1
    with pytest.raises(DataError, match=r"split dev\) cannot be loaded"):
        run(tmp_path, [], duck, work="other", sources=[{**source, "split": "dev"}])


def prompts(made, duck) -> list[str]:
    return sorted(row["prompt"] for row in rows(made, duck))


def test_versions_of_a_delta_table(tmp_path, duck, monkeypatch):
    """Also with partitions, and with columns that are newer than the first rows."""
    deltalake = pytest.importorskip("deltalake")
    monkeypatch.setattr(copies, "_STORED_ROWS", 2)
    path = tmp_path / "table"
    kinds = ["x y/z", "ü%20", None]
    first = pa.Table.from_pylist([qa(f"q{n}", "a", kind=kind) for n, kind in enumerate(kinds)])
    deltalake.write_deltalake(str(path), first, partition_by=["kind"])
    later = pa.Table.from_pylist([qa("new", "a", kind="x y/z", score=0.5)])
    deltalake.write_deltalake(str(path), later, mode="append", schema_mode="merge")
    source = {"path": "table", "type": "delta", "keep": {"kind": "text", "score": "number"}}
    made = run(tmp_path, [], duck, source=source)
    found = {(each["prompt"], each["kind"], each["score"]) for each in rows(made, duck)}
    wanted = {("q0", "x y/z", None), ("q1", "ü%20", None), ("q2", None, None)}
    assert found == wanted | {("new", "x y/z", 0.5)}
    # The copy is removed at the end, so that a row leads to the table itself.
    assert len(made.inputs) > 1
    known = {"inputs": [each.record() for each in made.inputs]}
    one = prepared.PreparedSet("set", tmp_path, {}, known)
    last = max(row["_id"] for row in rows(made, duck))
    assert prepared.origin(one, last) == f"row 4 of {path}, version 1"
    old = {**source, "version": 0, "keep": {"kind": "text"}}
    assert prompts(run(tmp_path, [], duck, source=old), duck) == ["q0", "q1", "q2"]
    limited = run(tmp_path, [], duck, work="limited", source={**old, "max_rows": 2})
    assert limited.rows.count == 2
    for name, more, words in (
        ("none", {"version": 9}, "table cannot be read as a Delta table: "),
        ("none", {"path": "nothing"}, "nothing cannot be read as a Delta table: "),
        ("file", {"type": None}, f"{path} is a Delta table: set path={path} and type=delta"),
    ):
        with pytest.raises(DataError, match=words):
            run(tmp_path, [], duck, work=name, source={**source, **more})
    # A file that vacuum has removed.
    next(path.rglob("*.parquet")).unlink()
    with pytest.raises(
        DataError, match=r"cannot be read: .*: run it on the table's newest version"
    ):
        run(tmp_path, [], duck, work="gone", source=source)


# Rows 0 and 3, as a deletion vector of Delta within the log.
DELETED = {"storageType": "i", "pathOrInlineDv": "^Bg9^0rr910000000000iXQKl0rr91000315c8Xg00093"}
DELETED |= {"sizeInBytes": 36, "cardinality": 2}


def test_deleted_rows_of_a_delta_table(tmp_path, duck):
    """Deletion vectors are read by deltalake, which does not write them; and nested texts."""
    deltalake = pytest.importorskip("deltalake")
    path = tmp_path / "table"
    table = pa.Table.from_pylist([{"messages": chat(f"q{n}", "a")} for n in range(6)])
    deltalake.write_deltalake(str(path), table)
    (log,) = (path / "_delta_log").glob("*.json")
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    features = {name: ["deletionVectors"] for name in ("readerFeatures", "writerFeatures")}
    for action in actions:
        if "protocol" in action:
            action["protocol"] = {"minReaderVersion": 3, "minWriterVersion": 7, **features}
        if "add" in action:
            action["add"]["deletionVector"] = DELETED
    log.write_text("\n".join(map(json.dumps, actions)))
    source = {"path": "table", "type": "delta", "format": "messages"}
    assert prompts(run(tmp_path, [], duck, source=source), duck) == ["q1", "q2", "q4", "q5"]


def test_rows_of_a_query(tmp_path, duck):
    con = sqlite3.connect(tmp_path / "db")
    con.execute("CREATE TABLE t (question TEXT, answer TEXT, quality REAL)")
    con.execute("INSERT INTO t VALUES ('Wo?', 'Hier ü', 0.5), ('x', NULL, 1), ('q', 'a', 1)")
    con.commit()
    source = {"url": f"sqlite://{tmp_path}/db", "query": "SELECT * FROM t;", "format": "qa"}
    source |= {"keep": {"quality": "number"}, "name": "db"}
    made = run(tmp_path, [], duck, sources=[source], max_bad_share=0.5)
    found = {(row["prompt"], row["answer"], row["quality"]) for row in rows(made, duck)}
    assert found == {("Wo?", "Hier ü", 0.5), ("q", "a", 1.0)}
    assert len(made.bad) == 1 and "'answer' is null" in made.bad[0]["reason"]
    # The same query again, with other rows.
    con.execute("DELETE FROM t WHERE answer IS NULL")
    con.commit()
    con.close()
    assert run(tmp_path, [], duck, sources=[source]).rows.count == 2
    with pytest.raises(DataError, match="source 'db': has no rows"):
        run(tmp_path, [], duck, sources=[{**source, "query": "SELECT * FROM t WHERE quality > 9"}])
    pytest.importorskip("psycopg")
    away = {**source, "url": "postgres://me:secret@127.0.0.1:1/x?password=other"}
    with pytest.raises(DataError, match="the database does not answer the query") as error:
        run(tmp_path, [], duck, sources=[away])
    assert "secret" not in str(error.value) and "other" not in str(error.value)


def test_a_missing_package_is_named(tmp_path, duck, monkeypatch):
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(DataError, match=r"deltalake is missing: bash setup.sh --with tables"):
        run(tmp_path, [], duck, source={"path": "table", "type": "delta"})
