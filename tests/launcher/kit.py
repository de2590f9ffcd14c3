"""The cookbook command as a user types it, and looks at what its runs left and started."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher.run.directory import Run
from tests import forked

# Looks like a token, so that a leak of it can be searched for.
FAKE_TOKEN = "hf_" + "Fake0Token1For2The3Tests4Only"

# A state that the job does not write itself, such as a requeued job's, is seen so late at most.
ASK_AGAIN_S = 3.0


@dataclass(frozen=True)
class Kit:
    """A user of the kit: an environment and a shared folder of their own."""

    env: dict[str, str]
    root: Path

    def cookbook(self, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run the command to its end, as a shell would."""
        if read_at_start(self.env) == read_at_start(os.environ):
            return forked.run(
                forked.LAUNCHER, forked.LAUNCHER, arguments, self.env, timeout=timeout
            )
        return subprocess.run(
            [sys.executable, "-m", "launcher", *arguments],
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def submit(self, *arguments: str) -> tuple[str, Path]:
        """Submit and return the job's id and the run's folder.

        Without the checks, which start the trainer each time: they have tests of their own.
        """
        done = self.cookbook("submit", "--json", "--no-check", *arguments)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        return told["job_id"], Path(told["path"])

    def status(self, run: Path) -> dict[str, Any]:
        done = self.cookbook("status", run.name, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def wait(self, run: Path, *states: str, timeout: float = 180) -> dict[str, Any]:
        """Return the run's status once it is in one of the states."""
        asked, record = -math.inf, None

        def look() -> dict[str, Any] | None:
            nonlocal asked, record
            # The command takes time from the ranks: it is asked when it may say something new.
            now, found = time.monotonic(), _modified(run / "status.json")
            if found == record and now - asked < ASK_AGAIN_S:
                return None
            told = self.status(run)
            asked, record = time.monotonic(), found
            return told if told["state"] in states else None

        return until(look, timeout, lambda: report(run))

    def runs(self) -> list[Path]:
        """Every entry of the runs folder, half-made ones too, but the trainer's tokenised data."""
        folder = self.root / "runs"
        found = sorted(folder.iterdir()) if folder.is_dir() else []
        return [entry for entry in found if entry.name != ".data_cache"]


def read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that Python and the launcher read when they are started or imported."""
    names = ("PYTHON", "LANG", "LC_", "LD_", "COOKBOOK_CLUSTERS")
    return {key: value for key, value in env.items() if key.startswith(names)}


def _modified(path: Path) -> int | None:
    """When a file was last replaced; None if there is none."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def until(look: Callable[[], Any], timeout: float, explain: Callable[[], str] = lambda: "") -> Any:
    """Return what look finds in the end; fail with an explanation after timeout seconds."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(0.3)
    pytest.fail(f"not within {timeout} s\n{explain()}")


def report(run: Path) -> str:
    """A run's own words, for a failed test."""
    files = [*run.glob("*.json*"), *run.glob("logs/*.log"), *run.glob("logs/*/node_*.log")]
    return "\n".join(f"== {path}\n{path.read_text(errors='replace')[-3000:]}" for path in files)


def losses(run: Path) -> dict[int, float]:
    """The logged loss of each step of a run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def checkpoints(run: Path) -> list[int]:
    """The steps of a run's complete checkpoints."""
    return sorted(int(path.parent.name[5:]) for path in run.glob("checkpoints/step_*/COMPLETE"))


def ranks_of(run: Path, program: str = "trainer.train") -> dict[int, int]:
    """The process ids of a run's ranks, by rank."""
    found = {}
    for process in psutil.process_iter(["environ", "cmdline"]):
        environ, argv = process.info["environ"] or {}, process.info["cmdline"] or [""]
        is_rank = program in " ".join(argv) and "bash" not in argv[0]
        if is_rank and environ.get("RUN_DIR") == str(run) and environ.get("RANK"):
            found[int(environ["RANK"])] = process.pid
    return found


def processes_of(run: Path, word: str = "") -> list[int]:
    """Every process that has the run's folder in its environment, and a word in its command."""
    return [
        process.pid
        for process in psutil.process_iter(["environ", "cmdline"])
        if (process.info["environ"] or {}).get("RUN_DIR") == str(run)
        and (not word or word in (process.info["cmdline"] or []))
        and process.pid != os.getpid()
    ]


def command(pid: int) -> str:
    """The words that a process was started with, with blanks between them; "" if it has ended."""
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


def model_folder(folder: Path, size: int = 8) -> Path:
    """A model folder that is whole: a header that promises what the file has."""
    folder.mkdir(parents=True)
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    weights = len(header).to_bytes(8, "little") + header + bytes(size)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


# Keys of a project whose script a shell starts on each node: torchrun takes seconds to start.
BY_SHELL = {"entry": "command", "command": "python train.py"}


def project(folder: Path, script: str, **keys: object) -> Path:
    """A folder of code with a recipe in it; returns the recipe's path."""
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "train.py").write_text(script)
    path = folder / "code" / "mine.yaml"
    content = {
        "entry": "script:train.py",
        "resources": {"nodes": 2, "gpus_per_node": 1, "cpus_per_gpu": 1, "time": "10"},
        **keys,
    }
    path.write_text(json.dumps(content))
    return path


def finished_run(root: Path, number: int) -> Run:
    """A run directory as a finished fine-tune leaves it."""
    path = root / "runs" / f"20261122-1000{number:02}-demo-aa{number:02}"
    model_folder(path / "export", size=8 + number)
    jobs = {"run": path.name, "recipe": "demo", "site": "default", "jobs": [{"job_id": "local-1"}]}
    (path / "submission.json").write_text(json.dumps(jobs))
    status = {"job_id": "local-1", "state": "COMPLETED", "started": 0.0, "ended": 36.0, "gpus": 2}
    (path / "status.json").write_text(json.dumps({**status, "attempt": 0}))
    (path / "attempts.jsonl").write_text(json.dumps({**status, "cause": "finished"}) + "\n")
    (path / "recipe.yaml").write_text("optimizer: {lr: 0.001}\nepochs: 3\n")
    record = {"created": 1.0, "config_sha256": "c" * 64, "kit": {"commit": "abc", "diff": ""}}
    record["data"] = [{"file": "/data/train.jsonl", "bytes": 10, "sha256": "d" * 64}]
    (path / "provenance.json").write_text(json.dumps(record))
    steps = ({"step": k, "time": float(k), "loss": 2.0 / k, "val_loss": None} for k in range(1, 6))
    lines = "".join(json.dumps(step) + "\n" for step in steps)
    (path / "metrics.jsonl").write_text(lines + '{"step": 6, "lo')
    return Run(path)
