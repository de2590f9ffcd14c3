"""How far a part of a step is: lines, progress.json, and the shares that DuckDB and tasks say."""

import json
import re
import threading
from pathlib import Path

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
