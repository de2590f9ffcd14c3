"""How far a part of a step is: lines, progress.json, and the shares that DuckDB and tasks say."""

import json
import re
import threading
from pathlib import Path

import ibis

from plugins.data import progress
from plugins.data.progress import Progress
from plugins.data.query_engines.tasks import Task
from tests.launcher.kit import until


def slow(target: Path, gate: str) -> None:
    """A task that ends once its gate is there."""
    until(Path(gate).exists, 60)
    target.write_text("done")


def test_rows_and_time_left_are_said(tmp_path, monkeypatch, duck):
    monkeypatch.setenv("RUN_DIR", str(tmp_path))
    monkeypatch.setattr(progress, "_EVERY_S", 0.02)
    monkeypatch.setattr(progress, "_PRINT_EVERY_S", 0.05)
    said: list[str] = []
    monkeypatch.setattr(duck, "progress", Progress(4, said.append))
    duck.progress.begin("03-tokens", 99)
    names = [f"{n}.out" for n in range(4)]
    jobs = [
        Task(f"{__name__}:slow", str(tmp_path / name), {"gate": str(tmp_path / f"{name}.go")}, 1000)
        for name in names
    ]
    # An earlier attempt finished the first one.
    Path(jobs[0].output).write_text("done")
    Path(jobs[1].options["gate"]).touch()
    running = threading.Thread(target=duck.run, args=(jobs, "counted"))
    running.start()
    try:
        half = re.compile(r"03-tokens counted: 2,000 of 4,000 rows, [\d,]+ rows/s, about .* left")
        until(lambda: any(half.fullmatch(line) for line in said), 60)
        told = json.loads((tmp_path / "progress.json").read_text())["part"]
        assert (told["rows"], told["of"]) == (2000, 4000) and told["left_s"] > 0
        # As much is left as was done since the attempt began.
        rate = told["rows_per_second"]
        assert abs(rate * told["left_s"] - 2000) <= 0.06 * rate
    finally:
        for job in jobs:
            Path(job.options["gate"]).touch()
        running.join()
    duck.progress.write("finished")
    ended = json.loads((tmp_path / "progress.json").read_text())
    assert ended["part"] is None and ended["saved"] == 4


def test_duckdb_says_its_share(tmp_path, duck):
    # What DuckDB makes itself has no share.
    duck.write(ibis.range(1_000_000).unnest().name("n").as_table(), tmp_path / "numbers")
    table = duck.read(tmp_path / "numbers")
    table = table.mutate(key=table.n.cast("string").hexdigest("md5")).order_by("key")
    shares: list[float | None] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.005):
            shares.append(duck._share())

    watching = threading.Thread(target=look)
    watching.start()
    try:
        # As often as it takes to look while it works.
        for number in range(50):
            duck.write(table, tmp_path / f"sorted{number}")
            if any(share is not None and 0 < share < 1 for share in shares):
                break
    finally:
        ended.set()
        watching.join()
    assert any(share is not None and 0 < share < 1 for share in shares)
    assert all(share is None or 0 <= share <= 1 for share in shares)
