"""Compares this trainer with other training engines: python -m benchmarks.train

    python -m benchmarks.train --workload llama8b_lora llama8b_full --out results
    python -m benchmarks.train --workload tiny_lora --device cpu

Each engine (one file in benchmarks/peers/) runs in its own process. All start from the same
weights, generated from a seed, train on the same packed rows, and are timed over the same steps.
train.json and train.md in --out are updated after every engine. Nothing is downloaded.
--peers ours:compile=false passes settings to an engine, under the engine's own names;
--python transformers=/path/bin/python selects its Python interpreter.
"""

import argparse
import datetime
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks import report, workloads
from benchmarks.peers import engine
from benchmarks.peers.engine import Job
from launcher import paths
from launcher.errors import CookbookError
from launcher.recipe.environment import Environment
from launcher.run import built
from plugins.engines.launcher.torchtune import ENGINE as TORCHTUNE

ROOT = Path(__file__).parents[1]
# Most important first, because the time may run out.
PEERS = (
    "ours",
    "torchtune",
    "transformers",
    "transformers:torch_compile=true",
)
# No engine is started with less time left; and time kept for writing the results.
MIN_START_S, RESERVE_S = 30.0, 10.0
LOG_LINES = 40


def argument_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workload", nargs="+", choices=tuple(workloads.WORKLOADS), required=True)
    parser.add_argument("--peers", nargs="+", default=list(PEERS), metavar="NAME[:KEY=VALUE...]")
    parser.add_argument("--python", nargs="*", type=_pair, default=[], metavar="NAME=INTERPRETER")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=None)
    parser.add_argument("--steps", type=int, default=20, help="measured steps (20)")
    parser.add_argument(
        "--warmup-steps", type=int, default=5, help="warm-up steps before these (5)"
    )
    parser.add_argument("--batch-size", type=int, help="rows per rank and step")
    parser.add_argument("--sequence", type=int, help="tokens per row")
    parser.add_argument("--dtype", choices=("bf16", "fp32"))
    parser.add_argument("--documents", choices=("packed", "whole"), default="packed")
    parser.add_argument("--ranks", type=int, default=1, help="processes, one GPU each (1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--budget-s", type=float, default=540.0, help="seconds for everything (540)"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    parser.add_argument(
        "--work", type=Path, help="keep models and logs in this folder; default: a temporary folder"
    )
    return parser


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if name not in available() or not value:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=INTERPRETER; NAME is one of {available()}"
        )
    return name, value


def _of_torchtune() -> str:
    """The interpreter of the environment of the entry torchtune:, which is built if needed."""
    environment = Environment.of({"dependencies": list(TORCHTUNE.dependencies)})
    try:
        return str(built.build(environment, paths.shared_root(), print) / "bin" / "python")
    except CookbookError as error:
        print(f"torchtune: {error}", file=sys.stderr)
        return sys.executable


def _absolute(path: str) -> str:
    # Engines start in the repository's root. Links stay: a virtual environment's python is one.
    return str(Path(path).absolute()) if os.sep in path else path


class Comparison:
    """One run of the benchmark: its options, time limits and report.

    Args:
        machine: what benchmarks.machine has measured; None measures it now.
    """

    def __init__(
        self, options: argparse.Namespace, work: Path, machine: dict[str, Any] | None = None
    ) -> None:
        self.options, self.work = options, work
        self.end = time.monotonic() + options.budget_s - RESERVE_S
        self.deadline = self.end
        # device_count() allocates nothing on the GPU, whose memory the engines need.
        self.device = options.device or ("cuda" if torch.cuda.device_count() else "cpu")
        self.pythons = {name: _absolute(path) for name, path in options.python}
        if any(peer.partition(":")[0] == "torchtune" for peer in options.peers):
            self.pythons = {"torchtune": _of_torchtune()} | self.pythons
        self.report: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "commit": commit(),
            "command": shlex.join(["python", "-m", "benchmarks.train", *sys.argv[1:]]),
            "convention": report.CONVENTION,
            "machine": machine or self._machine(),
            "workloads": [],
        }

    def run(self) -> None:
        """Measure the workloads; each gets an equal share of the time that is left."""
        names = self.options.workload
        for number, name in enumerate(names):
            now = time.monotonic()
            self.deadline = now + (self.end - now) / (len(names) - number)
            self._workload(name)
            self.write()

    def _workload(self, name: str) -> None:
        job = self.job(name)
        began = time.monotonic()
        prepared = workloads.prepare(job)
        print(f"{name}: weights and data generated in {time.monotonic() - began:.1f} s", flush=True)
        part = {
            "workload": name,
            "job": {k: v for k, v in asdict(job).items() if k not in ("folder", "out")},
            "filled": prepared.filled,
            "tolerances": report.tolerances(job),
            "rows": [],
        }
        self.report["workloads"].append(part)
        longest = 0.0
        for number, label in enumerate(self.options.peers, 1):
            began = time.monotonic()
            row = self._measure(label, replace(job, out=f"{job.folder}_{name}_{number}"), longest)
            if row["status"] == "ok":
                longest = max(longest, time.monotonic() - began)
                row |= report.measured(row, job, prepared, self.report["machine"])
            part["rows"].append(row)
            report.compare(part["rows"], job)
            self.write()
            print(report.summary(row), flush=True)

    def job(self, name: str) -> Job:
        """The job of a workload, without settings of an engine."""
        options = self.options
        overrides = {k: getattr(options, k) for k in ("batch_size", "sequence", "dtype")}
        dtype = options.dtype or workloads.WORKLOADS[name].dtype
        # Workloads with the same model share its folder.
        shape = name.rpartition("_")[0]
        return workloads.make_job(
            name,
            self.work / f"{shape}_{dtype}_{options.seed}",
            device=self.device,
            ranks=options.ranks,
            warmup_steps=options.warmup_steps,
            steps=options.steps,
            seed=options.seed,
            documents=options.documents,
            **{k: v for k, v in overrides.items() if v is not None},
        )

    def _measure(self, label: str, job: Job, expected_s: float) -> dict[str, Any]:
        """Run one engine; if it fails and a setting may fix that, try again with the setting."""
        peer, settings = parsed(label)
        before: list[str] = []
        while True:
            left = self.deadline - time.monotonic()
            if left < max(MIN_START_S, expected_s if not before else 0):
                answer = {"status": "skipped", "reason": f"no time: {max(left, 0):.0f} s left"}
                break
            answer = self._start(peer, replace(job, settings=settings), left)
            if not (again := answer.pop("retry_with", None)):
                break
            before.append(f"{answer['status']} ({answer['reason']}) without {again}")
            settings = {**settings, **again}
        return {"engine": label, "peer": peer, **answer, "before": before}

    def _start(self, peer: str, job: Job, limit_s: float) -> dict[str, Any]:
        shutil.rmtree(job.out, ignore_errors=True)
        path = engine.write_job(job)
        log, answer = path.with_name("log"), path.with_name(engine.RESULT)
        python = self.pythons.get(peer, sys.executable)
        with open(log, "w", encoding="utf-8") as file:
            process = subprocess.Popen(
                [python, "-m", f"benchmarks.peers.{peer}", str(path)],
                env=_environment(self.work, self.device, self.options.ranks),
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return {"status": "skipped", "reason": f"not finished in the {limit_s:.0f} s left"}
            finally:
                engine.end(process)
        lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
        found = {
            "status": "failed",
            "reason": f"exit status {process.returncode}: {lines[-1][:300]}",
        }
        if answer.exists():
            found = json.loads(answer.read_text())
        # The log file is deleted with the work folder.
        return found if found["status"] == "ok" else found | {"log": lines[-LOG_LINES:]}

    def _machine(self) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.machine", self.device],
            env=_environment(self.work, self.device, self.options.ranks),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return json.loads(done.stdout.splitlines()[-1])

    def write(self) -> None:
        """Bring the report to the disk, after each engine."""
        self.options.out.mkdir(parents=True, exist_ok=True)
        engine.write_json(self.options.out / "train.json", self.report)
        (self.options.out / "train.md").write_text(report.markdown(self.report), encoding="utf-8")


def parsed(label: str) -> tuple[str, dict[str, Any]]:
    """Name and settings of NAME:KEY=VALUE..."""
    peer, *pairs = label.split(":")
    return peer, {k: yaml.safe_load(v) for k, _, v in (pair.partition("=") for pair in pairs)}


def _environment(work: Path, device: str, ranks: int) -> dict[str, str]:
    # Some engines use every visible GPU and have no option to change that.
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(ranks)))
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled"}
    return {
        **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
        **offline,
        "CUDA_VISIBLE_DEVICES": ",".join(gpus.split(",")[:ranks]) if device == "cuda" else "",
        "HF_HOME": str(work / "hf"),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TOKENIZERS_PARALLELISM": "false",
    }


def commit() -> str | None:
    """What git says of this checkout; None without git."""
    if shutil.which("git") is None:
        return None
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip() or None


def main(arguments: list[str]) -> int:
    """Run the command; exit status 0 if our trainer was measured in each workload, else 1."""
    options = argument_parser().parse_args(arguments)
    unknown = {label.split(":")[0] for label in options.peers} - set(available())
    if unknown:
        known = ", ".join(available())
        argument_parser().error(f"--peers: no engine {', '.join(sorted(unknown))}; known: {known}")
    work = options.work or Path(tempfile.mkdtemp(prefix="cookbook-train-"))
    work = work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    try:
        comparison = Comparison(options, work)
        comparison.run()
    finally:
        if options.work is None:
            shutil.rmtree(work, ignore_errors=True)
    print(report.markdown(comparison.report))
    parts = comparison.report["workloads"]
    rows = [row for part in parts for row in part["rows"] if row["peer"] == "ours"]
    return int(any(row["status"] != "ok" for row in rows))


def available() -> list[str]:
    """Names of the engines: the files in benchmarks/peers/."""
    files = (ROOT / "benchmarks" / "peers").glob("*.py")
    return sorted(path.stem for path in files if path.stem != "engine")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
