"""Plants personal data that data preparation must find: python -m benchmarks.planted

In the forms in which people write it, beside numbers that are none. cookbook prepare runs on them
as a user's recipe does. It prints recall by kind and form, false alarms, and rows per CPU second of
the step, which is what a run takes longer than one without the step. --beside FOLDER runs the code
of another checkout in turns with this one.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import personal

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planted")
    parser.add_argument("--each", type=int, default=200, help="rows of each form")
    parser.add_argument("--count", type=int, default=100_000, help="rows whose time is measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", type=Path, help="a checkout of the code to compare with")
    given = parser.parse_args()
    sides = {"here": ROOT} | ({"beside": given.beside.resolve()} if given.beside else {})
    found = measure(sides, given.each, given.count, given.rounds)
    print(json.dumps(found, indent=1, sort_keys=True))


def measure(sides: dict[str, Path], each: int, count: int, rounds: int) -> dict[str, Any]:
    """What each side finds in the same rows, and its rows per CPU second, the sides in turn."""
    rows = list(personal.rows(each))
    made: dict[str, Any] = {}
    for name, code in sides.items():
        left, _ = prepared(code, [row["record"] for row in rows], [personal.STEP])
        made[name] = personal.judged(rows, left)
    many = list(personal.many(count, rows))
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, code in sides.items():
            _, without = prepared(code, many, [])
            _, seconds = prepared(code, many, [personal.STEP])
            rates[name].append(count / max(seconds - without, 0.01))
    made["rows_per_cpu_s"] = {
        name: [round(each) for each in found] for name, found in rates.items()
    }
    if "beside" in rates:
        # Other work on the machine only slows a round down.
        made["ratio_of_best"] = round(max(rates["here"]) / max(rates["beside"]), 2)
    return made


def prepared(
    code: Path, records: list[dict[str, Any]], steps: list[Any]
) -> tuple[dict[int, dict[str, Any]], float]:
    """Take steps as cookbook prepare does; return the rows by number, and the CPU seconds."""
    with tempfile.TemporaryDirectory(prefix="cookbook-planted-") as name:
        folder = Path(name)
        numbered = [{**record, "number": number} for number, record in enumerate(records)]
        pq.write_table(pa.Table.from_pylist(numbered), folder / "rows.parquet")
        source = {"path": "rows.parquet", "format": personal.FORMAT, "keep": {"number": "whole"}}
        recipe = {"sources": [source], "steps": steps, "threads": 1, "memory": "1G"}
        settings = {"name": "planted", "root": name, "base": name, "engine": "duckdb"}
        file = folder / "settings.yaml"
        file.write_text(json.dumps({**settings, "recipe": recipe}))
        argv = [sys.executable, "-m", "plugins.data.run", str(file), "--json"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(argv, cwd=code, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{code}: {done.stderr[-2000:]}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        parts = sorted((Path(json.loads(done.stdout)["folder"]) / "data").rglob("*.parquet"))
        left = [row for part in parts for row in pq.read_table(part).to_pylist()]
        return {row["number"]: row for row in left}, seconds


if __name__ == "__main__":
    main()
