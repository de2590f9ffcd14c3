"""GRPO here and by TRL, on the demo's task: the same rewards, and the time of an update.

    python -m benchmarks.rl --python TRL_ENVIRONMENT/bin/python [--seeds 0 1 2] [--out rl.json]

Model, prompts, reward, loss (DAPO's), optimizer, schedule and number of answers are the same; each
trainer draws from the seed in its own way. One process and one thread each, on the CPU; the two
take turns. --out keeps the runs: seeds that are there are not run again, so that it can be done in
parts.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "configs/recipes/demo_grpo.yaml"
METHOD = "plugins.rl.recipe_keys:GrpoConfig"
# The 100 prompts are four updates each epoch; neither trainer updates on a rest.
UPDATES, ANSWERS, GROUP, NEW_TOKENS, RATE, WARMUP = 100, 200, 8, 4, 1e-3, 5
WINDOWS = 10
# Student's t for 95 %, both sides, by degrees of freedom.
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}

Run = dict[str, list[float]]


def ours(model: Path, folder: Path, seed: int) -> Run:
    """Train here; the reward of each update, and the seconds of each but the first."""
    text = RECIPE.read_text().replace("${checkpointer.checkpoint_dir}", str(model))
    recipe = yaml.safe_load(text)
    for key in ("description", "entry", "resources", "prepare"):
        del recipe[key]
    recipe["checkpointer"]["checkpoint_dir"] = str(model)
    recipe["lr_scheduler"]["num_warmup_steps"] = WARMUP
    recipe["optimizer"]["lr"] = RATE
    recipe |= {"output_dir": str(folder), "device": "cpu", "seed": seed, "max_steps": UPDATES}
    recipe |= {"batch_size": ANSWERS, "group_size": GROUP, "max_new_tokens": NEW_TOKENS}
    recipe |= {"updates_per_rollout": 1, "log_every_n_steps": 1, "logged_rollouts": 0}
    recipe |= {"save_every_n_steps": None}
    folder.mkdir(parents=True)
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(recipe))
    own = os.environ | {"OMP_NUM_THREADS": "1"}
    _quietly([sys.executable, "-m", "trainer.train", METHOD, str(path)], folder, own)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "rewards": [line["reward"] for line in lines],
        "seconds": [line["step_time_s"] for line in lines[1:]],
    }


def trl(python: str, model: Path, folder: Path, seed: int) -> Run:
    """Train by TRL in its own environment; as `ours`."""
    folder.mkdir(parents=True)
    result = folder / "result.json"
    job = {"model": str(model), "data": str(model / "prompts.jsonl"), "out": str(folder)}
    job |= {"result": str(result), "answers": ANSWERS, "group": GROUP, "new_tokens": NEW_TOKENS}
    job |= {"updates": UPDATES, "lr": RATE, "warmup": WARMUP, "seed": seed, "threads": 1}
    own = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    script = ROOT / "benchmarks/peers/trl_grpo.py"
    _quietly([python, "-P", str(script), json.dumps(job)], folder, own)
    values: Run = json.loads(result.read_text())
    return values


def _quietly(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Run a trainer; SystemExit with the end of its output if it fails."""
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    (folder / "output.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        sys.exit(f"{' '.join(command[:3])} failed:\n{(done.stdout + done.stderr)[-3000:]}")


def interval(values: list[float]) -> tuple[float, float]:
    """The mean, and half of its 95 % interval; infinite for one value."""
    if len(values) < 2:
        return statistics.mean(values), math.inf
    error = statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values), T95.get(len(values) - 1, 1.96) * error


def summary(runs: dict[str, dict[str, Run]]) -> list[str]:
    """Rewards by tenths of the run, their difference by seed, and the time of an update."""
    both = list(runs.values())
    lines = [
        f"{len(both)} seeds, {UPDATES} updates of {ANSWERS} answers",
        "",
        "| updates | ours | TRL | difference, 95 % interval |",
        "|---|---|---|---|",
    ]

    def row(title: str, part: slice) -> str:
        means = {
            name: [statistics.mean(run[name]["rewards"][part]) for run in both]
            for name in ("ours", "trl")
        }
        apart = [a - b for a, b in zip(means["ours"], means["trl"], strict=True)]
        mean, half = interval(apart)
        own, other = (statistics.mean(each) for each in means.values())
        return f"| {title} | {own:.3f} | {other:.3f} | {mean:+.3f} ± {half:.3f} |"

    width = UPDATES // WINDOWS
    for begin in range(0, UPDATES, width):
        lines.append(row(f"{begin + 1} to {begin + width}", slice(begin, begin + width)))
    lines.append(row("all", slice(None)))
    times = {
        name: [statistics.median(run[name]["seconds"]) for run in both] for name in ("ours", "trl")
    }
    pairs = zip(times["ours"], times["trl"], strict=True)
    ratio = statistics.median(own / other for own, other in pairs)
    ms = {name: 1000 * statistics.median(each) for name, each in times.items()}
    lines += ["", f"time of an update: ours {ms['ours']:.0f} ms, TRL {ms['trl']:.0f} ms"]
    return [*lines, f"ours is {ratio:.2f} times TRL's (medians of runs that took turns)"]


def main(arguments: list[str]) -> int:
    """Run both for each seed, and print the table; exit status 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rl", description=__doc__)
    parser.add_argument("--python", required=True, help="of an environment with TRL")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, help="a file of runs, read and added to")
    given = parser.parse_args(arguments)
    kept = given.out is not None and given.out.is_file()
    runs: dict[str, dict[str, Run]] = json.loads(given.out.read_text()) if kept else {}
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        model = work / "model"
        making = [sys.executable, "-m", "plugins.rl.demo_sums", str(model)]
        subprocess.run(making, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        for number, seed in enumerate(seed for seed in given.seeds if str(seed) not in runs):
            values: dict[str, Run] = {}
            for name in ("ours", "trl") if number % 2 else ("trl", "ours"):
                folder = work / f"{name}{seed}"
                values[name] = (
                    ours(model, folder, seed)
                    if name == "ours"
                    else trl(given.python, model, folder, seed)
                )
            runs[str(seed)] = values
            if given.out is not None:
                given.out.write_text(json.dumps(runs) + "\n")
    print("\n".join(summary(runs)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
