"""Times `cookbook status` and `results` over many runs: python benchmarks/status.py [--runs N]

It makes N run directories (10,000) with the small files of a real one, K of which (20) have not
ended, in a temporary folder, and prints the seconds and the peak memory of the commands for the
newest runs and for all of them: the first time, with an empty page cache after that (only root can
empty it), and as the best of five.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ASKED = {"nodes": 2, "gpus_per_node": 2, "time": "00:30:00", "signal_lead_s": 300}

RECIPE = (Path(__file__).parent.parent / "configs" / "recipes" / "demo.yaml").read_text()


def make(root: Path, number: int, open_runs: int) -> None:
    """Make the run directories; the newest open_runs of them have no final state."""
    for k in range(number):
        day, second = divmod(k, 86400 // 10)
        clock = f"{second * 10 // 3600:02}{second * 10 // 60 % 60:02}{second * 10 % 60:02}"
        name = f"202601{day + 1:02}-{clock}-demo-{k % 65536:04x}"
        path = root / "runs" / name
        (path / "logs").mkdir(parents=True)
        job = {"job_id": str(1000 + k), "cluster": "demo", "controller": "head"}
        ended = k < number - open_runs
        times = {"started": 1767225600.0 + k, "updated": 1767229200.0 + k}
        status = {**job, "attempt": 0, "nodes": ["n1", "n2"], **times}
        if ended:
            status |= {"state": "COMPLETED", "ended": times["updated"], "message": ""}
        else:
            status["state"] = "RUNNING"
        step = {"step": 364, "loss": 0.00655, "step_time_s": 0.25, "mfu": None}
        rates = {"tokens_per_second_per_gpu": 1353.6, "mfu": None}
        progress = {"total_steps": 364, "state": "finished" if ended else "running", "step": 364}
        jobs = [{**job, "submitted": 1767225500.0}]
        submission = {"run": name, "recipe": "demo", "asked": ASKED, "jobs": jobs}
        for file, value in (
            ("submission.json", submission),
            ("status.json", status),
            ("progress.json", {**progress, "loss_last": 0.00655, "checkpoint_step": 364, **rates}),
        ):
            (path / file).write_text(json.dumps(value, indent=1))
        (path / "metrics.jsonl").write_text(f"{json.dumps(step | rates)}\n" * 40)
        (path / "job.sbatch").write_text("#!/bin/bash\n")
        (path / "recipe.yaml").write_text(f"{RECIPE}seed: {k % 97}\nrun_note: {k}\n")
        os.utime(path, (times["updated"], times["updated"]))


def timed(root: Path, *options: str) -> tuple[float, float]:
    """Return the seconds of a command and its peak memory in MiB."""
    argv = [str(Path(sys.prefix) / "bin" / "cookbook"), *options]
    began = time.perf_counter()
    process = subprocess.Popen(
        argv,
        env={**os.environ, "COOKBOOK_ROOT": str(root), "XDG_CACHE_HOME": str(root / "cache")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(argv)} failed: run it with COOKBOOK_ROOT={root}")
    return time.perf_counter() - began, used.ru_maxrss / 1024


def emptied() -> bool:
    """Empty the page cache; return False if that is not allowed."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--open", type=int, default=20)
    given = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="cookbook-status-"))
    try:
        make(root, given.runs, given.open)
        print(f"{'':<24}{'first':>8}{'cold':>8}{'best':>8}{'MiB':>7}")
        status, results = ("status", "status --all"), ("results", "results --all")
        for words in (*status, *results, "results --all --json"):
            first, _ = timed(root, *words.split())
            cold = f"{timed(root, *words.split())[0]:.2f}s" if emptied() else "-"
            measured = [timed(root, *words.split()) for _ in range(5)]
            best, memory = min(t for t, _ in measured), max(used for _, used in measured)
            print(f"{words:<27}{first:>5.2f}s{cold:>8}{best:>7.2f}s{memory:>7.0f}")
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
