"""Times the cookbook command relative to its imports and to sbatch: python benchmarks/launcher.py

It times, in turns and as the best of several rounds: a Python process that only imports click,
jinja2 and yaml; `cookbook --help`; `cookbook submit --dry-run`; and, if Slurm answers,
`cookbook submit` and a plain sbatch of the same script. Each job is cancelled before the next
command is timed: none runs beside it. It prints seconds and ratios. With --check the exit status
is 1 if a value is above its target.
"""

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
# The recipe that is submitted and cancelled again.
SUBMITTED = ["--recipe", "demo", "--nodes", "1"]


def run(argv: list[str], env: dict[str, str]) -> str:
    return subprocess.run(
        argv, env=env, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL
    ).stdout


def best(
    tasks: dict[str, Callable[[], object]],
    rounds: int = ROUNDS,
    after: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Best wall time of each task in seconds; the tasks run in turns, so that noise affects all.

    after: what is done after each task, and not timed.
    """
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, task in tasks.items():
            started = time.perf_counter()
            task()
            times[name].append(time.perf_counter() - started)
            after()
    return {name: min(values) for name, values in times.items()}


def main() -> int:
    root = Path(tempfile.mkdtemp(prefix="cookbook-bench-"))
    # As for a user, whose Python keeps the compiled code.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env["COOKBOOK_ROOT"] = str(root)
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
        for name, label, limit in (
            ("help", "cookbook --help", 2.0),
            ("dry run", "cookbook submit --dry-run", 4.0),
        ):
            ratio = times[name] / base
            rows.append((label, times[name], "x imports", ratio, f"at most {limit:g}"))
            missed |= ratio > limit
        if shutil.which("sinfo") and subprocess.run(["sinfo"], capture_output=True).returncode == 0:
            overhead = submit_overhead(env)
            rows.append(("cookbook submit minus sbatch", overhead, "s", overhead, "at most 0.5"))
            missed |= overhead > 0.5
        else:
            print("Slurm does not answer (sinfo): submit is not timed", file=sys.stderr)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    for label, seconds, unit, value, target in rows:
        print(f"{label:<32} {seconds:7.3f} s  {value:6.2f} {unit:<10} {target}")
    return 1 if missed and "--check" in sys.argv else 0


def submit_overhead(env: dict[str, str]) -> float:
    """Seconds that `cookbook submit` takes longer than sbatch of the same script."""
    # Those not cancelled yet.
    jobs: list[str] = []
    scripts: list[str] = []

    def cookbook_submit() -> None:
        submitted = json.loads(run([COOKBOOK, "submit", "--json", *SUBMITTED], env))
        jobs.append(submitted["job_id"])
        scripts.append(str(Path(submitted["path"]) / "job.sbatch"))

    def plain_sbatch() -> None:
        jobs.append(run(["sbatch", "--parsable", "--hold", scripts[-1]], env).strip())

    def cancel() -> None:
        while jobs:
            job = jobs.pop()
            subprocess.run(["scancel", job], capture_output=True)
            # It may have started: until none of its processes is left.
            listed = ["squeue", "--noheader", "--states=RUNNING,COMPLETING", f"--jobs={job}"]
            while subprocess.run(listed, capture_output=True, text=True).stdout.strip():
                time.sleep(0.1)

    try:
        cookbook_submit()  # creates the demo's model before the timing starts
        cancel()
        times = best({"submit": cookbook_submit, "sbatch": plain_sbatch}, 5, cancel)
    finally:
        cancel()
    return times["submit"] - times["sbatch"]


if __name__ == "__main__":
    sys.exit(main())
