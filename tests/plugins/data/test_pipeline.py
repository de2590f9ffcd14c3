"""A whole preparation: nothing is done twice, and a set appears whole or not at all."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ibis
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from plugins.data import output
from plugins.data import run as preparation
from plugins.data.errors import DataError
from plugins.data.query_engines import tasks
from plugins.data.query_engines.duck import DuckDB
from runspec import prepared
from slurm import history
from tests.plugins.data.kit import chat, lines, qa, written

STEPS = ["exact_duplicates", "personal_data", {"split": {"train": 0.8, "val": 0.2}}]


def settings(folder: Path, name: str = "set", **more) -> dict:
    recipe = {"sources": [{"path": "data.jsonl", "format": "qa"}], "steps": STEPS, "threads": 1}
    where = {"name": name, "root": str(folder / "datasets"), "base": str(folder)}
    return {**where, "engine": "duckdb", "recipe": {**recipe, **more}}


@pytest.fixture
def raw(tmp_path) -> Path:
    records = [qa(f"question {n}", f"answer {n % 60} me{n % 60}@x.org") for n in range(90)]
    lines(tmp_path / "data.jsonl", [*records, records[0], records[1], "{broken"])
    return tmp_path


def test_what_a_set_holds(raw):
    told = preparation.prepare(settings(raw, max_bad_share=0.1))
    folder = Path(told["folder"])
    assert (raw / "datasets/prepared/set/current").resolve() == folder
    found = written(folder / "data")
    assert len(found) == 90 == told["rows"] and sum(told["splits"].values()) == 90
    assert found[0]["messages"] == [
        {"role": "user", "content": "question 0"},
        {"role": "assistant", "content": "answer 0 [EMAIL]"},
    ]
    lineage = json.loads((folder / "lineage.json").read_text())
    assert [step["rows_out"] for step in lineage["steps"]] == [90, 90, 90]
    assert lineage["steps"][0]["samples"][0]["kept_id"] == 1
    assert lineage["steps"][1]["changed"][0]["after"].endswith("[EMAIL]")
    assert lineage["bad_rows"] == 1 and 'line": 93' in (folder / "bad_rows.jsonl").read_text()
    removed = pq.read_table(folder / "removed" / "01-exact_duplicates").to_pylist()
    assert {(row["_id"], row["kept_id"]) for row in removed} == {(91, 1), (92, 2)}
    assert not prepared.changes(folder / "data" / "train")
    assert not (folder.parent / ".work").exists()
    # The same rows again are the same version, and another recipe is another one.
    assert preparation.prepare(settings(raw, max_bad_share=0.1))["folder"] == told["folder"]
    other = preparation.prepare(settings(raw, max_bad_share=0.1, seed=1))
    assert other["folder"] != told["folder"] and folder.is_dir()
    part = next((folder / "data" / "train").glob("*.parquet"))
    pq.write_table(pq.read_table(part).slice(1), part)
    assert prepared.changes(folder / "data" / "train") == [f"data/train/{part.name} has changed"]


@pytest.mark.parametrize(
    ("form", "record", "columns"),
    [
        ("text", {"text": "a text"}, {"text"}),
        ("messages", {"messages": chat("q", "yes", "Be brief.")}, {"messages"}),
        ("preference", {"prompt": "q", "chosen": "yes", "rejected": "no"}, {"chosen", "rejected"}),
    ],
)
def test_a_set_of_each_form_is_written_whole(tmp_path, form, record, columns):
    lines(tmp_path / "data.jsonl", [{**record, "user": f"u{n}"} for n in range(20)])
    source = {"path": "data.jsonl", "format": form, "keep": {"user": "text"}}
    steps = [{"split": {"shares": {"train": 0.5, "val": 0.5}, "group": "user"}}]
    folder = Path(preparation.prepare(settings(tmp_path, sources=[source], steps=steps))["folder"])
    found = written(folder / "data")
    assert len(found) == 20 and len(list((folder / "data").glob("*/*.parquet"))) == 2
    assert {"text", "messages", "chosen", "rejected"} & found[0].keys() == columns
    assert found[0].get("messages") in (None, record.get("messages"))


def test_the_hash_is_of_the_rows_and_not_of_their_order_or_files(tmp_path):
    hashes = [hashlib.md5(str(n).encode()).hexdigest() for n in range(100)]
    parts = {"a": hashes, "b": hashes[::-1], "c": hashes[:-1], "d": hashes[:7], "e": hashes[7:]}
    found = {}
    for name, order in parts.items():
        pq.write_table(pa.table({"md5": order}), tmp_path / name, row_group_size=30)
        found[name] = output.content_hash(tmp_path / name)
    assert found["a"] == found["b"] != found["c"]
    numbers = [int.from_bytes(bytes.fromhex(each), "little") for each in hashes]
    assert found["a"] == (100, sum(numbers) % 2**128)
    assert (found["d"][1] + found["e"][1]) % 2**128 == found["a"][1], "in two files"


def test_a_term_that_python_drops_ends_the_process_later():
    """What a destructor raises goes nowhere, as what a library's callback raises."""
    script = """
import signal, time
from plugins.data import job

class Slow:
    def __del__(self):
        print("ready", flush=True)
        time.sleep(30)

job.AGAIN_S = 0.2
signal.signal(signal.SIGTERM, job.stop)
Slow()
try:
    time.sleep(30)
finally:
    print("cleaned", flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.terminate()
    printed, ignored = process.communicate(timeout=20)
    assert (process.returncode, printed) == (143, "cleaned\n")
    assert "Exception ignored" in ignored and "SystemExit: 143" in ignored


def test_a_killed_run_goes_on_and_finished_steps_stay(raw, monkeypatch):
    """The run is ended when it writes its output; the next one does no step again."""
    spilled = raw / "spilled"
    spilled.mkdir()
    given = settings(raw, max_bad_share=0.1, temp_dir=str(spilled))
    file = raw / "settings.json"
    file.write_text(json.dumps(given))
    # As in a job, whose retries are judged by what each attempt has saved.
    job = raw / "run"
    job.mkdir()
    monkeypatch.setenv("RUN_DIR", str(job))
    before = -1
    for number, status in ((signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)):
        ended = (
            "import os, sys; from plugins.data import output, run; "
            f"output._splits = lambda *given: os.kill(os.getpid(), {number:d}); run.main()"
        )
        argv = [sys.executable, "-c", ended, str(file)]
        done = subprocess.run(argv, capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        # Nothing can clean up after a KILL but the next run.
        assert len(list(spilled.iterdir())) == (number == signal.SIGKILL)
        # Only the first attempt came further than all before it.
        assert history.gained_by(job, {"saved_at_start": before}) == (number == signal.SIGTERM)
        before = history.saved_work(job)
    folder = raw / "datasets" / "prepared" / "set"
    assert not (folder / "current").exists() and list(folder.glob(".tmp-*"))
    times = {path: path.stat().st_mtime_ns for path in (folder / ".work").rglob("*.parquet")}
    assert len(times) >= 4
    kept = {}
    write = output.write

    def look(*arguments):
        kept.update({path: path.stat().st_mtime_ns for path in times})
        return write(*arguments)

    monkeypatch.setattr(output, "write", look)
    told = preparation.prepare(given)
    assert kept == times and told["rows"] == 90 and not list(folder.glob(".tmp-*"))
    assert not list(spilled.iterdir())
    progress = json.loads((job / "progress.json").read_text())
    assert progress["state"] == "finished" and progress["step"] == progress["total_steps"] == 5
    assert history.gained_by(job, {"saved_at_start": before})


def test_two_runs_on_one_name_do_not_mix(raw):
    with (
        preparation._alone(raw / "datasets" / "prepared" / "set"),
        pytest.raises(DataError, match=f"another run .process {os.getpid()} on .* prepares set"),
    ):
        preparation.prepare(settings(raw, max_bad_share=0.1))


def die_once(target: Path, mark: str) -> None:
    """A task whose process is killed the first time."""
    if not Path(mark).exists():
        Path(mark).touch()
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    target.write_text("done")


def test_a_killed_worker_costs_its_task(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    jobs = [
        tasks.Task(
            "tests.plugins.data.test_pipeline:die_once",
            str(tmp_path / f"{n}.out"),
            {"mark": str(tmp_path / ("mark" if n == 1 else "data"))},
        )
        for n in range(3)
    ]
    (tmp_path / "data").touch()
    assert tasks.run_here(jobs, 2) == []
    assert [path.read_text() for path in sorted(tmp_path.glob("*.out"))] == ["done"] * 3
    assert (tmp_path / "mark").exists() and not list(tmp_path.glob(".*"))


@pytest.mark.long
def test_memory_is_capped_and_the_rest_spills(tmp_path, duck):
    """Two million rows are sorted within 100 MB: what does not fit goes to the disk."""
    small = DuckDB(200 * 2**20, tmp_path, 1)
    try:
        numbers = ibis.range(2_000_000).unnest().name("n").as_table()
        table = numbers.mutate(key=numbers.n.cast("string").hexdigest("md5"))
        small.write(table.order_by("key"), tmp_path / "sorted")
        limit = small.con.raw_sql("SELECT current_setting('memory_limit')").fetchone()
        assert limit == ("100.0 MiB",)
        assert pq.read_table(tmp_path / "sorted", columns=["key"])["key"][0].as_py() < "0001"
    finally:
        small.close()
    assert not list(tmp_path.glob("cookbook-duckdb-*"))


def test_no_disk_for_spilling(raw, monkeypatch):
    with pytest.raises(DataError, match="temp_dir: there is no folder /nowhere"):
        preparation.prepare(settings(raw, temp_dir="/nowhere"))
    monkeypatch.setattr(preparation, "_LEAST_FREE", 2**62)
    with pytest.raises(DataError, match="MiB free, and the engine spills there"):
        preparation.prepare(settings(raw))
    assert not list((raw / "datasets" / "prepared" / "set").glob("[!.]*"))
