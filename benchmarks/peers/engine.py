"""The interface of an engine: reads job.json, times its own steps, writes result.json.

An engine is one file in this folder. It runs in its own process, started as
`python -m benchmarks.peers.<name> <job.json>`, if needed with its own Python interpreter. So this
module needs only torch, safetensors and psutil, and imports nothing from the trainer.
"""

import importlib.metadata
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

GIB = 2**30
IGNORE_INDEX = -100
# AdamW in all engines. No weight decay, because engines apply it to different parameters.
BETAS, EPSILON, WEIGHT_DECAY, CLIP = (0.9, 0.95), 1e-8, 0.0, 1.0
# One warm-up step from 0, because some engines need one: step 1 changes no weights.
LR_WARMUP_STEPS = 1
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
JOB, RESULT = "job.json", "result.json"
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


class Skip(Exception):
    """This engine cannot run this job on this machine; the message says why."""


@dataclass(frozen=True)
class Job:
    """One measurement.

    folder: input of all engines, written by `workloads.prepare`.
    out: the engine's own folder, for its output and result.json.
    model: the `model` block of a recipe.
    targets: the layers with adapters, by the last parts of their names.
    documents: packed (several per row) or whole (one, which fills its row).
    settings: changes to the engine's defaults, under the engine's own names.
    """

    folder: str
    out: str
    workload: str
    method: str
    model: dict[str, Any]
    device: str
    dtype: str
    sequence: int
    batch_size: int
    ranks: int
    warmup_steps: int
    steps: int
    seed: int
    lr: float
    lora_rank: int
    lora_alpha: int
    documents: str
    targets: list[str] = field(default_factory=lambda: list(TARGETS))
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def total_steps(self) -> int:
        """Warm-up steps plus measured steps."""
        return self.warmup_steps + self.steps

    @property
    def model_folder(self) -> Path:
        """Hugging Face folder of the base model."""
        return Path(self.folder) / "model"

    @property
    def adapter_folder(self) -> Path:
        """PEFT folder of the initial adapter."""
        return Path(self.folder) / "adapter"

    @property
    def corpus(self) -> Path:
        """The documents: one JSON object with the key `text` per line."""
        return Path(self.folder) / "corpus.jsonl"

    @property
    def rows_file(self) -> Path:
        """The rows in training order."""
        return Path(self.folder) / "rows.safetensors"

    def setting(self, name: str, default: Any) -> Any:
        """The engine's setting of this name, or its default."""
        return self.settings.get(name, default)

    def rows(self) -> dict[str, Any]:
        """tokens, labels, positions: int64 [rows, sequence].

        Labels are the tokens, not shifted; -100 for padding and for the first token of each
        document, which has no context to be predicted from. Positions start at 0 in each
        document; the padding of a row counts as a document.
        """
        from safetensors.torch import load_file

        return {name: tensor.long() for name, tensor in load_file(self.rows_file).items()}


class Recorder:
    """Records an engine's steps inside its process; a step ends when its loss is known."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._steps: list[dict[str, Any]] = []
        self._last: float | None = None
        self._memory: dict[str, float | None] = {}

    @property
    def done(self) -> bool:
        """True when all steps are recorded; later work of the engine is not measured."""
        return len(self._steps) >= self._job.total_steps

    def step(self, loss: float, grad_norm: float | None) -> None:
        """Record one optimizer step. Memory peaks cover the measured steps only."""
        if self.done:
            return
        import torch

        cuda = self._job.device == "cuda"
        if cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self._steps.append(
            {
                "step": len(self._steps) + 1,
                "loss": float(loss),
                "grad_norm": None if grad_norm is None else float(grad_norm),
                "seconds": None if self._last is None else now - self._last,
            }
        )
        self._last = now
        if cuda and len(self._steps) == self._job.warmup_steps:
            torch.cuda.reset_peak_memory_stats()
        if self.done:
            self._memory = {
                "peak_allocated_gib": torch.cuda.max_memory_allocated() / GIB if cuda else None,
                "peak_reserved_gib": torch.cuda.max_memory_reserved() / GIB if cuda else None,
                "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB,
            }

    def result(self, **settings: Any) -> dict[str, Any]:
        """The engine's result (rank 0; other ranks return {}); `settings`: what it ran with."""
        if int(os.environ.get("RANK", 0)):
            return {}
        if not self.done:
            raise RuntimeError(
                f"the engine stopped after {len(self._steps)} of {self._job.total_steps} steps"
            )
        return {"steps": self._steps, **self._memory, "settings": settings}


def main(
    run: Callable[[Job], dict[str, Any]],
    *,
    packages: tuple[str, ...],
    ranks: str,
    fallback: dict[str, Any] | None = None,
) -> None:
    """Run the job given on the command line and write result.json into its folder.

    Args:
        run: takes a Job and returns `Recorder.result`; raises Skip if it cannot run the job.
        packages: packages whose versions are reported.
        ranks: how several ranks are started: "torchrun" (it calls `run` on each rank), or "itself"
            (`run` starts them).
        fallback: settings to try if `run` fails on a GPU without them.
    """
    job = read_job(sys.argv[1])
    if job.ranks > 1 and ranks == "torchrun" and "RANK" not in os.environ:
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={job.ranks}"]
        command = [sys.executable, "-m", *torchrun, "-m", _module(), sys.argv[1]]
        os.execv(sys.executable, command)
    result: dict[str, Any] = {"status": "ok"}
    try:
        result |= run(job)
    except (Skip, ImportError) as error:
        result |= {"status": "skipped", "reason": _first_line(error)}
    except Exception as error:
        traceback.print_exc()
        result |= failure(
            job,
            type(error).__name__,
            _first_line(error),
            fallback if job.device == "cuda" else None,
        )
    result["versions"] = {name: version(name) for name in packages}
    if int(os.environ.get("RANK", 0)) == 0:
        write_json(Path(job.out) / RESULT, result)
    sys.stdout.flush()
    sys.stderr.flush()
    # Ends whatever the engine left running, such as data loaders.
    os._exit(result["status"] not in ("ok", "skipped"))


def end(process: subprocess.Popen) -> None:
    """Kill a process, its session if it leads one, and all its children."""
    try:
        # torchrun's ranks have sessions of their own.
        ranks = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        ranks = []
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.kill()
    process.wait()


def failure(
    job: Job, kind: str, message: str, fallback: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The result of a failed run, with settings under which it may succeed."""
    if kind == "OutOfMemoryError":
        retry = {"activation_checkpointing": True}
        result = {"status": "out of memory", "reason": message}
    else:
        retry = fallback or {}
        result = {"status": "failed", "reason": f"{kind}: {message}"}
    if retry.keys() - job.settings.keys():
        result["retry_with"] = retry
    return result


def version(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON; the file is replaced atomically."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def read_job(path: str | Path) -> Job:
    """Read a job.json."""
    return Job(**json.loads(Path(path).read_text(encoding="utf-8")))


def write_job(job: Job) -> Path:
    """Write job.json into the engine's folder; returns its path."""
    path = Path(job.out) / JOB
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(job))
    return path


def _module() -> str:
    return str(sys.modules["__main__"].__spec__.name)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
