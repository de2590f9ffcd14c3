"""An evaluation of many prompts that is killed again and again: python benchmarks/evaluation.py

Asks a tiny model by one worker to the end, and by four that are killed several times, of which none
may answer what is saved. Both must give the same table.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "configs" / "datasets" / "slurm_qa.jsonl"


def prepare(folder: Path, prompts: int) -> dict[str, Any]:
    """Make a model and so many samples; return the settings of an evaluation of them."""
    argv = [sys.executable, "-m", "trainer.demo", str(folder / "model"), "--dataset", str(DATA)]
    subprocess.run(argv, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    with open(folder / "data.jsonl", "w") as out:
        for k in range(prompts):
            row = rows[k % len(rows)]
            row = {"question": f"{row['question']} ({k})", "answer": row["answer"], "part": k % 3}
            out.write(json.dumps(row) + "\n")
    task = {"kind": "generation", "data": str(folder / "data.jsonl"), "group": "part"}
    settings = {"dtype": "fp32", "device": "cpu", "batch_size": 64, "max_new_tokens": 4}
    settings |= {"resamples": 1000, "shard_samples": 128, "candidate": str(folder / "model")}
    return {**settings, "tasks": {"answers": task}}


def start(run: Path, rank: int, world: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world)}
    argv = [sys.executable, "-m", "plugins.evaluate.main", str(run / "train.yaml")]
    return subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)


def shards(run: Path) -> dict[str, int]:
    """Return the saved shards and when each was written."""
    found = (run / "evals" / "shards").glob("*.json")
    return {path.name: path.stat().st_mtime_ns for path in found}


def evaluated(run: Path, settings: dict[str, Any], world: int, kills: int) -> dict[str, Any]:
    """Run an evaluation to its end; kill all its workers so often, each time a part further."""
    run.mkdir()
    (run / "train.yaml").write_text(json.dumps(settings))
    with open(settings["tasks"]["answers"]["data"]) as lines:
        total = -(-sum(1 for _ in lines) // settings["shard_samples"])
    began, again = time.monotonic(), 0
    for turn in range(1, kills + 2):
        before = shards(run)
        workers = [start(run, rank, world) for rank in range(world)]
        try:
            while any(worker.poll() is None for worker in workers):
                if turn <= kills and len(shards(run)) >= turn * total // (kills + 1):
                    for worker in workers:
                        worker.send_signal(signal.SIGKILL)
                    break
                time.sleep(0.2)
        finally:
            for worker in workers:
                worker.wait()
        after = shards(run)
        again += sum(after[name] != when for name, when in before.items())
    result = json.loads((run / "evals" / "suite.json").read_text())["tasks"]
    seconds = round(time.monotonic() - began, 1)
    told = {"workers": world, "kills": kills, "shards": total, "seconds": seconds}
    return {**told, "saved_shards_made_again": again, "table": result}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = prepare(folder, options.prompts)
        whole = evaluated(folder / "whole", settings, 1, 0)
        killed = evaluated(folder / "killed", settings, 4, options.kills)
    same = whole.pop("table") == killed.pop("table")
    print(json.dumps({"prompts": options.prompts, "same_table": same, "runs": [whole, killed]}))
    return 0 if same and not killed["saved_shards_made_again"] else 1


if __name__ == "__main__":
    sys.exit(main())
