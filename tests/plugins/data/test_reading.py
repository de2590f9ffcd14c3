"""Reading files: encodings, limits, long fields, and kept values that are the same in any file."""

import csv
import gzip
import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from plugins.data import openers, pipeline
from plugins.data.errors import DataError
from tests.plugins.data.kit import lines, qa, rows, run

MANY = [qa(f"q{n}", f"a{n}") for n in range(60)]


def write(folder: Path, kind: str, records: list) -> str:
    """Write records as a file of a kind; return its name."""
    path = folder / f"data.{kind}"
    text = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in records)
    if kind == "jsonl.gz":
        path.write_bytes(gzip.compress(text.encode()))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    elif kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, records[0])
            writer.writeheader()
            writer.writerows(records)
    else:
        path.write_text(json.dumps(records) if kind == "json" else text)
    return path.name


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "csv", "parquet"])
def test_limits_of_rows(tmp_path, duck, kind):
    name = write(tmp_path, kind, MANY)
    made = run(tmp_path, [], duck, source={"path": name, "max_rows": 7})
    assert [row["prompt"] for row in rows(made, duck)] == [f"q{n}" for n in range(7)]
    config = {"sources": [{"path": name, "format": "qa"}], "steps": []}
    preview = pipeline.run(config, duck, tmp_path / "preview", tmp_path, 1, lambda text: None, 5)
    assert preview.rows.count == 5


def test_a_limit_is_of_the_source_and_not_of_a_file(tmp_path, duck, monkeypatch):
    monkeypatch.setattr(openers, "BLOCK_BYTES", 300)
    monkeypatch.setattr(openers, "_PIECE", 200)
    (tmp_path / "in").mkdir()
    for part in range(3):
        lines(tmp_path / "in" / f"{part}.jsonl", [MANY[part * 20], "", *MANY[part * 20 + 1 :][:19]])
        table = pa.Table.from_pylist(MANY[part * 20 : part * 20 + 20])
        pq.write_table(table, tmp_path / f"{part}.parquet")
    for path in ("in", "*.parquet"):
        source = {"path": path, "max_rows": 45}
        made = run(tmp_path, [], duck, work=f"w-{path[0]}", source=source)
        assert [row["prompt"] for row in rows(made, duck)] == [f"q{n}" for n in range(45)]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "jsonl.gz"])
def test_byte_order_marks_say_the_encoding(tmp_path, duck, kind, encoding):
    # A character whose UTF-16 has the byte of a newline.
    path = tmp_path / write(tmp_path, kind, [qa("ü\u010a", "猫"), qa("q", "a")])
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if kind.endswith("gz") else raw).decode()
    coded = text.encode(encoding)
    path.write_bytes(gzip.compress(coded) if kind.endswith("gz") else coded)
    made = run(tmp_path, [], duck, source={"path": path.name})
    found = rows(made, duck)
    assert [(row["prompt"], row["answer"]) for row in found] == [("ü\u010a", "猫"), ("q", "a")]
    first = 2 if kind == "csv" else 1
    assert [row["_id"] for row in found] == [first, first + 1] and not len(made.bad)


def test_encodings_that_are_given_or_not_to_be_found(tmp_path, duck):
    path = tmp_path / "data.csv"
    path.write_bytes("question,answer\nq,ä\n".encode("utf-16-le"))
    with pytest.raises(DataError, match=r"data.csv has zero bytes .*: set encoding=utf-16-le"):
        run(tmp_path, [], duck, source={"path": "data.csv"})
    for encoding in ("utf-16-le", "latin-1"):
        path.write_bytes("question,answer\nq,ä\n".encode(encoding))
        source = {"path": "data.csv", "encoding": encoding}
        made = run(tmp_path, [], duck, work=encoding, source=source)
        assert [row["answer"] for row in rows(made, duck)] == ["ä"]
    odd = "question,answer\nq,ä\n".encode("utf-16") + b"x"
    for name in ("data.csv", "data.jsonl"):
        (tmp_path / name).write_bytes(odd)
        with pytest.raises(
            DataError, match=rf"{name}.* is not utf-16.*set encoding= of the source"
        ):
            run(tmp_path, [], duck, work=f"w-{name}", source={"path": name})


def test_long_fields_of_csv(tmp_path, duck, monkeypatch):
    text = "ä" * 200_000
    write(tmp_path, "csv", [qa("q", text), qa("p", "a")])
    made = run(tmp_path, [], duck, source={"path": "data.csv"})
    assert [row["answer"] for row in rows(made, duck)] == [text, "a"]
    monkeypatch.setattr("plugins.data.ingest._LONGEST_FIELD", 1000)
    (tmp_path / "data.csv").write_text("question,answer\np,a\nq," + '"open\n' + "x\n" * 2000)
    with pytest.raises(DataError, match=r"record that begins in line 3: .*a quote may be open"):
        run(tmp_path, [], duck, work="open", source={"path": "data.csv"})


def test_empty_texts_stay_whatever_else_a_file_holds(tmp_path, duck):
    """A null beside them, or a text that needs a look, changes nothing."""
    plain = [qa("q", "a", user=""), qa("p", "a", user=None), qa("r", "a", user="me")]
    keep = {"user": "text"}
    for name, records in (("plain", plain), ("looked", [*plain, qa(" ", "a", user="x")])):
        for kind in ("parquet", "jsonl", "csv"):
            source = {"path": write(tmp_path, kind, records), "keep": keep}
            made = run(tmp_path, [], duck, work=name + kind, source=source, max_bad_share=0.5)
            found = [row["user"] for row in rows(made, duck)]
            # CSV has no null.
            assert found == ([None, None, "me"] if kind == "csv" else ["", None, "me"])


def test_kept_values_of_every_type(tmp_path, duck):
    moment = datetime(2026, 1, 31, 12, 30, tzinfo=UTC)
    values = {
        "moment": pa.array([moment], pa.timestamp("us")),
        "nanos": pa.array([1_000_000_001], pa.timestamp("ns")),
        "day": pa.array([moment.date()]),
        "price": pa.array([Decimal("1.50")]),
        "raw": pa.array([b"abc"]),
        "nested": pa.array([{"at": moment}]),
        "truth": pa.array([True]),
    }
    keep = dict.fromkeys(values, "text")
    expected = {
        "moment": "2026-01-31 12:30:00.000000",
        "nanos": "1970-01-01 00:00:01.000000001",
        "day": "2026-01-31",
        "price": "1.50",
        "raw": "abc",
        "nested": '{"at": "2026-01-31 12:30:00+00:00"}',
        "truth": "true",
    }
    for question in ("q", " "):
        # The second row of the second file needs a look, and with it its batch.
        texts = {"question": ["q", question], "answer": ["a", "b"]}
        twice = {name: pa.concat_arrays([array, array]) for name, array in values.items()}
        pq.write_table(pa.table({**texts, **twice}), tmp_path / "data.parquet")
        source = {"path": "data.parquet", "keep": keep}
        made = run(tmp_path, [], duck, work=f"w{question}", source=source, max_bad_share=0.5)
        assert {name: rows(made, duck)[0][name] for name in keep} == expected


@pytest.mark.parametrize(
    ("value", "kind"), [("1" * 30, "whole"), (1.5, "whole"), ("\ud800", "text"), (2, "flag")]
)
def test_kept_values_that_do_not_fit_are_bad_rows(tmp_path, duck, value, kind):
    lines(tmp_path / "data.jsonl", [qa("q", "a", n=value), qa("q", "a", n="1")])
    made = run(tmp_path, [], duck, source={"keep": {"n": kind}}, max_bad_share=0.5)
    assert made.rows.count == 1 and made.bad[0]["reason"].startswith(f"'n' is not of type {kind}")


def test_a_file_of_several_tasks(tmp_path, duck, monkeypatch):
    """Row groups of one file are read by tasks of their own, under the numbers of their rows."""
    monkeypatch.setattr("plugins.data.parquet.LARGE", 1)
    records = [qa(f"q{n}", f"a{n}", n=str(n)) for n in range(100)]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "data.parquet", row_group_size=30)
    made = run(tmp_path, [], duck, source={"path": "data.parquet", "keep": {"n": "whole"}})
    assert made.rows.folder and len(list(made.rows.folder.glob("part-*"))) == 4
    assert {row["_id"]: row["n"] for row in rows(made, duck)} == {n + 1: n for n in range(100)}
