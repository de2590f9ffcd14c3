"""Times the cookbook command against what it stands on: python benchmarks/launcher.py

All in one run, alternating, best of several: the imports that the command cannot do without,
`cookbook --help`, `cookbook submit --dry-run`, and, where Slurm answers, `cookbook submit` against
a bare sbatch of the same script (both cancelled again). Prints seconds and ratios; with --check it
ends with status 1 where a ratio is above its target.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

COOKBOOK = str(Path(sys.prefix) / "bin" / "cookbook")
ROUNDS = 9
# Held in the queue: what is timed is the way there.
HELD = ["--recipe", "demo", "--nodes", "1"]


def run(argv: list[str], env: dict[str, str]) -> str:
    return subprocess.run(
        argv, env=env, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL
    ).stdout


def best(tasks: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """Best wall time of each task in seconds; the tasks alternate, so that noise meets all."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, task in tasks.items():
            started = time.perf_counter()
            task()
            times[name].append(time.perf_counter() - started)
    return {name: min(values) for name, values in times.items()}


def main() -> int:
    root = Path(tempfile.mkdtemp(prefix="cookbook-bench-"))
    env = {**os.environ, "COOKBOOK_ROOT": str(root)}
    rows: list[tuple[str, float, str, float, str]] = []
    missed = False
    try:
        imports = [sys.executable, "-c", "import click, jinja2, yaml"]
        dry = [COOKBOOK, "submit", "--recipe", "llama70b_lora", "--dry-run"]
        times = best(
            {
                "imports": lambda: run(imports, env),
                "help": lambda: run([COOKBOOK, "--help"], env),
                "dry run": lambda: run(dry, env),
            }
        )
        base = times["imports"]
        rows.append(("import click, jinja2, yaml", base, "", 1.0, ""))
        for name, label, most in (
            ("help", "cookbook --help", 2.0),
            ("dry run", "cookbook submit --dry-run", 4.0),
        ):
            ratio = times[name] / base
            rows.append((label, times[name], "x imports", ratio, f"at most {most:g}"))
            missed |= ratio > most
        if shutil.which("sinfo") and subprocess.run(["sinfo"], capture_output=True).returncode == 0:
            added = submit_cost(env)
            rows.append(("cookbook submit, beyond sbatch", added, "s", added, "at most 0.5"))
            missed |= added > 0.5
        else:
            print("no Slurm answers here: submit is not timed", file=sys.stderr)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    for label, seconds, unit, value, target in rows:
        print(f"{label:<32} {seconds:7.3f} s  {value:6.2f} {unit:<10} {target}")
    return 1 if missed and "--check" in sys.argv else 0


def submit_cost(env: dict[str, str]) -> float:
    """Seconds that submit takes beyond a bare sbatch of the script that it made."""
    jobs: list[str] = []
    scripts: list[str] = []

    def ours() -> None:
        told = json.loads(run([COOKBOOK, "submit", "--json", *HELD], env))
        jobs.append(told["job_id"])
        scripts.append(str(Path(told["path"]) / "job.sbatch"))

    def bare() -> None:
        jobs.append(run(["sbatch", "--parsable", "--hold", scripts[-1]], env).strip())

    try:
        ours()  # the demo's model is made once, before the clock runs
        times = best({"ours": ours, "bare": bare}, rounds=5)
    finally:
        for job in jobs:
            subprocess.run(["scancel", job], capture_output=True)
    return times["ours"] - times["bare"]


if __name__ == "__main__":
    sys.exit(main())
