"""Sources: formats and files of each type, bad rows, and wrong input in one line."""

import bz2
import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from plugins.data import formats, openers
from plugins.data.errors import BadRow, DataError
from tests.plugins.data.kit import chat, lines, qa, rows, run

CHAT = chat("hello", "hi", "be brief")
FORMATS = {
    "alpaca": ({"instruction": "hello", "input": "you", "output": "hi"}, "hello\n\nyou", "hi"),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]},
        "hello",
        "hi",
    ),
    "messages": ({"messages": CHAT}, "be brief\nhello", "hi"),
    "qa": ({"question": "hello", "answer": "hi"}, "hello", "hi"),
    "text": ({"text": "hello"}, None, "hello"),
    "preference": ({"prompt": "hello", "chosen": "hi", "rejected": "go away"}, "hello", "hi"),
}


@pytest.mark.parametrize("form", FORMATS)
def test_formats_are_read_alike_from_lines_and_parquet(tmp_path, duck, form):
    record, prompt, answer = FORMATS[form]
    lines(tmp_path / "data.jsonl", [record])
    pq.write_table(pa.Table.from_pylist([record]), tmp_path / "data.parquet")
    for name in ("data.jsonl", "data.parquet"):
        source = {"path": name, "format": form}
        (row,) = rows(run(tmp_path, [], duck, work=f"w-{form}-{name[5]}", source=source), duck)
        assert (row["prompt"], row["answer"], row["_id"]) == (prompt, answer, 1)
        assert (json.loads(row["messages"]) == CHAT) if form == "messages" else not row["messages"]
        assert row["rejected"] == ("go away" if form == "preference" else None)


def test_a_log_of_requests_is_a_source(tmp_path, duck):
    """What serving keeps: messages as JSON text, the answer in a column of its own."""
    log = {"request_id": "r1", "messages": json.dumps(CHAT[:2]), "answer": "hi", "label": "ok"}
    (tmp_path / "log").mkdir()
    pq.write_table(pa.Table.from_pylist([log]), tmp_path / "log" / "part-0.parquet")
    source = {"path": "log", "format": "messages", "columns": {"answer": "answer"}}
    source["keep"] = {"label": "text", "request_id": "text"}
    (row,) = rows(run(tmp_path, [], duck, source=source), duck)
    assert json.loads(row["messages"]) == CHAT and row["label"] == "ok"


def test_types_folders_and_packed_files(tmp_path, duck):
    folder = tmp_path / "in"
    folder.mkdir()
    first = json.dumps(qa("q1", "a1")).encode()
    (folder / "1.jsonl.gz").write_bytes(gzip.compress(first + b"\n\n"))
    (folder / "2.json").write_text(json.dumps([qa("q2", "a2"), qa("q3", "a3")]))
    (folder / "3.csv").write_text('question,answer\n"q4, with\na line",a4\nq5,a5\n')
    (folder / "4.jsonl.bz2").write_bytes(bz2.compress(first.replace(b"1", b"6")))
    with pa.CompressedOutputStream(str(folder / "5.jsonl.zst"), "zstd") as file:
        file.write(first.replace(b"1", b"7"))
    (folder / "notes.txt").write_text("no data")
    made = run(tmp_path, [], duck, source={"path": "in"})
    found = rows(made, duck)
    assert [row["answer"] for row in found] == ["a1", "a2", "a3", "a4", "a5", "a6", "a7"]
    # A row's id leads to its record: the file's number, then the line or the record in it.
    assert [(row["_id"] >> 40, row["_id"] % 2**40) for row in found[3:5]] == [(2, 2), (2, 4)]


def test_blocks_of_a_large_file_keep_the_numbers_of_lines(tmp_path, duck, monkeypatch):
    monkeypatch.setattr(openers, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(openers, "_PIECE", 700)
    records = [qa(f"q{n}", "ä" * (n % 50)) if n % 7 else "" for n in range(1, 300)]
    path = lines(tmp_path / "data.jsonl", records)
    _, blocks = openers.survey(path, True)
    assert len(blocks) > 5 and blocks[-1]["end"] == path.stat().st_size
    made = run(tmp_path, [], duck, max_bad_share=0.1)
    assert {row["_id"]: row["prompt"] for row in rows(made, duck)} == {
        n: f"q{n}" for n in range(1, 300) if n % 7 and n % 50
    }
    assert [bad["line"] for bad in made.bad] == [n for n in range(50, 300, 50) if n % 7]


BAD = [
    ('{"question": "q", "answer": ', "is not JSON"),
    ("[1]", "is JSON, but not an object"),
    ('{"question": "q"}', "has no column 'answer', only question"),
    ('{"question": "q", "answer": null}', "'answer' is null"),
    ('{"question": "q", "answer": 5}', "'answer' is not a text but int"),
    ('{"question": " ", "answer": "a"}', "'question' is empty"),
    ('{"question": "\\ud800", "answer": "a"}', "half of a surrogate pair"),
    ('{"question": "q", "answer": "a", "n": "x"}', "'n' is not of type whole: 'x'"),
]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"tool_calls": [{"function": {"name": "f"}}]}, "has tool_calls, which prepared sets do"),
        ({"reasoning_content": "hm", "weight": 0}, "has reasoning_content, weight 0, which"),
        ({"weight": 1, "tool_calls": None, "thinking": ""}, None),
    ],
)
def test_what_a_message_would_lose_makes_a_bad_row(more, told):
    read = formats.reader("messages", {})
    record = {"messages": [*CHAT[:2], CHAT[2] | more], "tools": []}
    if told is None:
        assert read(record).answer == "hi"
        record["messages"][0] = {"role": "developer", "content": "be brief"}
        assert json.loads(read(record).messages or "") == CHAT
        record |= {"tools": [{"type": "function"}]}
        told = "the conversation has tools"
    with pytest.raises(BadRow, match=told):
        read(record)


def test_bad_rows_are_kept_aside_and_stop_the_run_past_a_share(tmp_path, duck):
    lines(tmp_path / "data.jsonl", [*(text for text, _ in BAD), *[qa("q", "a", n=1)] * 8])
    with open(tmp_path / "data.jsonl", "ab") as file:
        file.write(b'{"question": "\xff", "answer": "a", "n": 1}\n')
    source = {"keep": {"n": "whole"}}
    made = run(tmp_path, [], duck, source=source, max_bad_share=0.6)
    assert made.rows.count == 8 and len(made.bad) == 9
    for number, (bad, (_, words)) in enumerate(zip(made.bad, BAD, strict=False), 1):
        assert bad["line"] == number and words in bad["reason"]
    assert "is not utf-8 (byte 14)" in made.bad[8]["reason"] and made.bad[8]["line"] == 17
    with pytest.raises(DataError) as error:
        run(tmp_path, [], duck, source=source)
    assert "9 of 17 rows cannot be read, which is more than max_bad_share=0.01" in str(error.value)
    assert f"{tmp_path}/data.jsonl, line 1: is not JSON" in error.value.faults[1]


def test_wrong_files_are_named_all_at_once(tmp_path, duck):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "what.bin").write_text("x")
    named = ["nothing.jsonl", "empty.jsonl", "what.bin", "none*.csv"]
    sources = [{"path": name, "format": "qa", "name": name[:4]} for name in named]
    with pytest.raises(DataError) as error:
        run(tmp_path, [], duck, sources=sources)
    words = ["there is no file", "is empty", "cannot tell its type", "no file fits the pattern"]
    assert len(error.value.faults) == 4
    for fault, word, name in zip(error.value.faults, words, named, strict=True):
        assert word in fault and name in fault


def test_another_schema_in_the_second_file(tmp_path, duck):
    pq.write_table(pa.Table.from_pylist([qa("q", "a")]), tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist([{"q": "q", "a": "a"}]), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b.parquet, line 1: has no column 'question', only q, a"):
        run(tmp_path, [], duck, source={"path": "*.parquet"})


def test_a_file_that_is_cut_short(tmp_path, duck):
    (tmp_path / "data.jsonl.gz").write_bytes(gzip.compress(b"x" * 1000)[:-10])
    with pytest.raises(DataError, match=r"data.jsonl.gz: cannot be read"):
        run(tmp_path, [], duck, source={"path": "data.jsonl.gz"})
    path = tmp_path / "data.parquet"
    pq.write_table(pa.Table.from_pylist([qa(f"q{n}", "a" * 99) for n in range(999)]), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(
        DataError, match=r"data.parquet is not a complete Parquet file .*: copy it again"
    ):
        run(tmp_path, [], duck, source={"path": "data.parquet"})
    path.write_bytes(whole[:500] + bytes(800) + whole[1300:])
    with pytest.raises(DataError, match=r"data.parquet: cannot be read: .*: copy it again"):
        run(tmp_path, [], duck, source={"path": "data.parquet"})
    table = [{**qa(f"q{n}", "a" * 99), "n": float(n % 7)} for n in range(999)]
    pq.write_table(pa.Table.from_pylist(table), path)
    kept, whole = pq.ParquetFile(path).metadata.row_group(0).column(2), path.read_bytes()
    begin = kept.dictionary_page_offset + 20
    path.write_bytes(whole[:begin] + b"\xff" * 60 + whole[begin + 60 :])
    source = {"path": "data.parquet", "keep": {"n": "number"}}
    with pytest.raises(DataError, match=r"data.parquet: cannot be read: .*: copy it again"):
        run(tmp_path, [{"filter": "n > 2"}], duck, source=source)


def test_columns_that_are_all_null(tmp_path, duck):
    """A kept column without a value is one for all steps; a text without any is a bad row."""
    records = [qa(f"q{n}", f"a{n}", quality=None, user=None) for n in range(30)]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "data.parquet")
    lines(tmp_path / "data.jsonl", records)
    keep = {"quality": "number", "user": "text"}
    steps = [
        {"exact_duplicates": {"keep": "quality"}},
        {"split": {"shares": {"train": 0.5, "test": 0.5}, "stratify": "user", "group": ["user"]}},
    ]
    for name in ("data.jsonl", "data.parquet"):
        source = {"path": name, "keep": keep}
        made = run(tmp_path, steps, duck, work=f"w-{name}", source=source)
        assert made.rows.count == 30
        assert {row["split"] for row in rows(made, duck)} == {"train", "test"}
        with pytest.raises(DataError, match=r"filter: no rows are left; the step removed 30"):
            run(tmp_path, [{"filter": "quality > 0"}], duck, work=f"f-{name}", source=source)
    with pytest.raises(DataError, match=r"data.parquet, line 1: 'user' is null"):
        source = {"path": "data.parquet", "columns": {"answer": "user"}}
        run(tmp_path, [], duck, work="other", source=source)


def test_a_file_that_changes_while_it_is_read(tmp_path, duck, monkeypatch):
    path = lines(tmp_path / "data.jsonl", [qa("q", "a")])
    before = type(duck).run

    def read_then_write(self, tasks, done):
        before(self, tasks, done)
        with path.open("a") as file:
            file.write("\n")

    monkeypatch.setattr(type(duck), "run", read_then_write)
    with pytest.raises(DataError, match=r"data.jsonl changed while it was read: run it again"):
        run(tmp_path, [], duck)
    assert not list((tmp_path / "work").glob("00-read-*"))
