"""Measures cookbook prepare: python -m benchmarks.data rows | near [--count N] [--out FOLDER]

rows: filter, exact duplicates and split, beside the same query written by hand for DuckDB.
near: near duplicates with planted pairs; with --peers PYTHON also beside datasketch and datatrove,
which that Python has (pip install datasketch==2.0.0 'datatrove[processing]==0.10.0' orjson spacy).
Both are slow, so all three see the first --peer-count documents.
Ratios of one run count: both sides run one after the other on the same machine.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_WORDS = 50_000
_PEERS = ("datasketch", "datatrove")
_MEMORY = "2G"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data")
    parser.add_argument("what", choices=("rows", "near"))
    parser.add_argument("--count", type=int)
    parser.add_argument("--out", type=Path, default=Path("/tmp/cookbook-data-benchmark"))
    parser.add_argument("--peers", metavar="PYTHON", default="")
    parser.add_argument("--peer", action="append", choices=_PEERS, help="only this one")
    parser.add_argument("--peer-count", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3, help="each side so often, in turn")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.what == "rows":
        found = rows(given.out, given.count or 5_000_000, given.rounds)
    else:
        found = near(
            given.out,
            given.count or 1_000_000,
            given.peers,
            given.peer or _PEERS,
            given.peer_count,
            given.rounds,
        )
    print(json.dumps(found, indent=1))


def _texts(generator: np.random.Generator, words: Any, count: int, length: int) -> list[str]:
    places = generator.integers(0, len(words), (count, length))
    return [" ".join(row) for row in words[places]]


def _words() -> Any:
    generator = np.random.default_rng(3)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    sizes = generator.integers(3, 10, _WORDS)
    return np.array(["".join(generator.choice(letters, size)) for size in sizes])


def _prepare(out: Path, name: str, recipe: dict[str, Any]) -> dict[str, Any]:
    settings = {"name": name, "root": str(out / "sets"), "base": str(out), "engine": "duckdb"}
    settings |= {"recipe": recipe, "keep_work": True}
    file = out / f"{name}.yaml"
    file.write_text(json.dumps(settings))
    shutil.rmtree(out / "sets" / "prepared" / name, ignore_errors=True)
    argv = [sys.executable, "-m", "plugins.data.run", str(file), "--json"]
    output, used = _measured(argv)
    return {**json.loads(output), **used}


def _measured(argv: list[str]) -> tuple[str, dict[str, float]]:
    """Run a program; return its output, and its seconds, those of its CPUs, and its peak memory."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        if status:
            raise SystemExit(
                f"{argv[:4]}: exit status {process.returncode}: {errors.read()[-2000:]}"
            )
    used = {"wall_s": time.monotonic() - began, "cpu_s": usage.ru_utime + usage.ru_stime}
    return output, {**used, "peak_mib": usage.ru_maxrss // 1024}


# Rows ----------------------------------------------------------------------------------------

_BY_HAND = """
import duckdb, sys
source, target = sys.argv[1:]
con = duckdb.connect()
con.execute("SET enable_progress_bar = false")
con.execute("SET memory_limit='2GiB'; SET threads=2; SET preserve_insertion_order=false")
con.execute(f"SET temp_directory='{target}/spill'")
con.execute(f'''COPY (
  SELECT *, CASE WHEN h < 'cccccccc' THEN 'train' WHEN h < 'e6666666' THEN 'val'
    ELSE 'test' END AS split
  FROM (
    SELECT *, substr(md5(question || chr(10) || answer), 1, 8) AS h,
      row_number() OVER (PARTITION BY md5(question || chr(10) || answer) ORDER BY number) AS place
    FROM read_parquet('{source}/*.parquet') WHERE quality >= 0.3
  ) WHERE place = 1
) TO '{target}/rows' (FORMAT parquet, PARTITION_BY (split))''')
print(con.execute(f"SELECT count(*) FROM read_parquet('{target}/rows/*/*.parquet')").fetchone()[0])
"""


def rows(out: Path, count: int, rounds: int) -> dict[str, Any]:
    """Compare both on rows of which a fifth are exact duplicates; ratios are of each round."""
    source = out / f"rows-{count}"
    if not source.is_dir():
        _make_rows(source, count)
    target = out / "by-hand"
    recipe = {
        "memory": _MEMORY,
        "threads": 2,
        "sources": [{"path": str(source), "format": "qa", "keep": {"quality": "number"}}],
        "steps": [
            {"filter": "quality >= 0.3"},
            "exact_duplicates",
            {"split": {"train": 0.8, "val": 0.1, "test": 0.1}},
        ],
    }
    found: dict[str, list[float]] = {"wall_s": [], "cpu_s": [], "wall_ratio": [], "cpu_ratio": []}
    for _ in range(rounds):
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        # What an earlier side wrote must not slow down the next one.
        os.sync()
        output, by_hand = _measured([sys.executable, "-c", _BY_HAND, str(source), str(target)])
        os.sync()
        told = _prepare(out, "rows", recipe)
        for name in ("wall", "cpu"):
            found[f"{name}_s"] += [round(by_hand[f"{name}_s"], 1), round(told[f"{name}_s"], 1)]
            ratio = round(told[f"{name}_s"] / by_hand[f"{name}_s"], 2)
            found[f"{name}_ratio"].append(ratio)
    return {
        "rows": count,
        "by_hand_rows": int(output),
        "prepare_rows": told["rows"],
        "seconds_by_hand_and_prepared": found["wall_s"],
        "cpu_seconds_by_hand_and_prepared": found["cpu_s"],
        "ratios": found["wall_ratio"],
        "cpu_ratios": found["cpu_ratio"],
        "median_ratio": statistics.median(found["wall_ratio"]),
        "steps_s": {step["step"]: step["seconds"] for step in told["steps"]},
        "peak_mib": told["peak_mib"],
        "bytes": sum(path.stat().st_size for path in source.iterdir()),
    }


def _make_rows(folder: Path, count: int) -> None:
    generator, words = np.random.default_rng(1), _words()
    temporary = folder.with_name(f".{folder.name}")
    temporary.mkdir(parents=True, exist_ok=True)
    step = 250_000
    for begin in range(0, count, step):
        size = min(step, count - begin)
        fresh = size * 4 // 5
        questions = _texts(generator, words, fresh, 8)
        answers = _texts(generator, words, fresh, 20)
        again = generator.integers(0, fresh, size - fresh)
        questions += [questions[place] for place in again]
        answers += [answers[place] for place in again]
        made = {"question": questions, "answer": answers}
        made |= {"quality": generator.random(size), "number": np.arange(begin, begin + size)}
        pq.write_table(pa.table(made), temporary / f"part-{begin // step:05d}.parquet")
    temporary.rename(folder)


# Near duplicates -----------------------------------------------------------------------------


def near(
    out: Path, count: int, peers: str, names: Sequence[str], peer_count: int, rounds: int
) -> dict[str, Any]:
    """Measure recall and precision against planted pairs of known similarity, and the rate."""
    source = out / f"near-{count}"
    if not source.is_dir():
        _make_near(source, count)
    recipe = {
        "memory": _MEMORY,
        "threads": 2,
        "sources": [{"path": str(source / "documents"), "format": "text"}],
        "steps": [{"near_duplicates": {"jaccard": 0.8, "ngram": 3}}],
    }
    told = _prepare(out, "near", recipe)
    work = out / "sets" / "prepared" / "near" / ".work"
    step = told["steps"][0]
    found = _judge(work, source)
    made = {
        "documents": count,
        **found,
        "seconds": step["seconds"],
        "documents_per_s": round(count / step["seconds"]),
        "notes": step["notes"],
        "peak_mib": told["peak_mib"],
    }
    if peers:
        turns = (_beside_peers(out, source, peers, names, peer_count) for _ in range(rounds))
        made["peers"] = list(turns)
    return made


def _beside_peers(
    out: Path, source: Path, python: str, names: Sequence[str], count: int
) -> dict[str, Any]:
    """One round: each on the first documents, one after the other; ours as a whole process."""
    few = out / f"near-first-{count}"
    few.mkdir(exist_ok=True)
    first = pq.read_table(source / "documents", columns=["text"]).slice(0, count)
    pq.write_table(first, few / "part-00000.parquet")
    recipe = {
        "memory": _MEMORY,
        "threads": 2,
        "sources": [{"path": str(few), "format": "text"}],
        "steps": [{"near_duplicates": {"jaccard": 0.8, "ngram": 3}}],
    }
    ours = _prepare(out, "near-first", recipe)
    found: dict[str, Any] = {"documents": count}
    found["prepare"] = {"wall_s": round(ours["wall_s"], 1), "cpu_s": round(ours["cpu_s"], 1)}
    for name in names:
        argv = [python, "-m", "benchmarks.peers.near", name, str(few), str(out)]
        _, used = _measured(argv)
        found[name] = {
            "wall_s": round(used["wall_s"], 1),
            "cpu_s": round(used["cpu_s"], 1),
            "times_ours": round(used["wall_s"] / ours["wall_s"], 1),
        }
    return found


def _make_near(folder: Path, count: int) -> None:
    """Documents of 120 words; a tenth are copies with some words changed, from 0 to 12."""
    generator, words = np.random.default_rng(2), _words()
    temporary = folder.with_name(f".{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    (temporary / "documents").mkdir(parents=True)
    step, pairs = 100_000, []
    for begin in range(0, count, step):
        size = min(step, count - begin)
        fresh = size * 9 // 10
        places = generator.integers(0, len(words), (fresh, 120))
        originals = generator.permutation(fresh)[: size - fresh]
        copies = places[originals].copy()
        for number, row in enumerate(copies):
            changed = generator.choice(120, generator.integers(0, 13), replace=False)
            row[changed] = generator.integers(0, len(words), len(changed))
            one, other = _grams(places[originals[number]]), _grams(row)
            similarity = len(one & other) / len(one | other)
            # Row ids count from 1 within each file; the files are numbered.
            first = (begin // step << 40) + int(originals[number]) + 1
            second = (begin // step << 40) + fresh + number + 1
            pairs.append((first, second, similarity))
        texts = [" ".join(row) for row in words[np.concatenate([places, copies])]]
        path = temporary / "documents" / f"part-{begin // step:05d}.parquet"
        pq.write_table(pa.table({"text": texts}), path)
    columns = list(zip(*pairs, strict=True))
    pq.write_table(
        pa.table({"a": columns[0], "b": columns[1], "similarity": columns[2]}),
        temporary / "pairs.parquet",
    )
    temporary.rename(folder)


def _grams(row: Any) -> set[tuple[int, ...]]:
    listed = row.tolist()
    return {tuple(listed[place : place + 3]) for place in range(len(listed) - 2)}


def _judge(work: Path, source: Path) -> dict[str, Any]:
    """Recall over planted pairs of at least 0.8, precision over all pairs that were found."""
    (folder,) = work.glob("01-near_duplicates-*")
    table = pq.read_table(folder / "similar")
    pairs = set(zip(table["a"].to_pylist(), table["b"].to_pylist(), strict=True))
    truth = pq.read_table(source / "pairs.parquet").to_pylist()
    similar = {(row["a"], row["b"]) for row in truth if row["similarity"] >= 0.8}
    # Random documents share nothing: every similar pair is a planted one.
    return {
        "planted_similar": len(similar),
        "found": len(pairs),
        "recall": round(len(similar & pairs) / max(len(similar), 1), 4),
        "precision": round(len(similar & pairs) / max(len(pairs), 1), 4),
    }


if __name__ == "__main__":
    main()
