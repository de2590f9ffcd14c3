"""What an engine is asked, how it measures itself, and what it answers: JSON in, JSON out.

An engine is one file beside this one. It is started as `python -m benchmarks.peers.<name> <job>`,
in a process of its own and, where it needs one, by an interpreter of its own; so this module needs
torch, safetensors and psutil only, and imports nothing of the trainer.
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
# All engines: AdamW without weight decay, which not every engine applies to the same parameters.
BETAS, EPSILON, WEIGHT_DECAY, CLIP = (0.9, 0.95), 1e-8, 0.0, 1.0
# One step of warm-up from 0, since not every engine takes none: step 1 changes nothing.
LR_WARMUP_STEPS = 1
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
JOB, RESULT = "job.json", "result.json"
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


class Skip(Exception):
    """This engine cannot do this job here; the message says why."""


@dataclass(frozen=True)
class Job:
    """One measurement.

    folder: what all engines read, as `workloads.prepare` made it.
    out: this engine's own folder, for its output and its answer.
    model: the `model` block of a torchtune config.
    documents: packed, several in a row, or whole, one that fills its row.
    settings: what was asked of this engine beyond its best defaults, by its own names.
    """

    folder: str
    out: str
    workload: str
    method: str
    model: dict[str, Any]
    model_type: str
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
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def total_steps(self) -> int:
        """Steps of the warm-up and those that are measured."""
        return self.warmup_steps + self.steps

    @property
    def model_folder(self) -> Path:
        """Hugging Face folder of the base model."""
        return Path(self.folder) / "model"

    @property
    def adapter_folder(self) -> Path:
        """PEFT folder of the adapter as every engine begins with it."""
        return Path(self.folder) / "adapter"

    @property
    def corpus(self) -> Path:
        """The documents, a JSON object with `text` a line."""
        return Path(self.folder) / "corpus.jsonl"

    @property
    def rows_file(self) -> Path:
        """The rows in the order in which they are trained."""
        return Path(self.folder) / "rows.safetensors"

    def setting(self, name: str, default: Any) -> Any:
        """What was asked of the engine by this name, or its default."""
        return self.settings.get(name, default)

    def rows(self) -> dict[str, Any]:
        """tokens, labels, positions: int64 [rows, sequence].

        Labels are the tokens themselves, not shifted, and -100 for padding and for the first
        token of each document, which nothing predicts. Positions begin at 0 in each document;
        what pads a row counts as one.
        """
        from safetensors.torch import load_file

        return {name: tensor.long() for name, tensor in load_file(self.rows_file).items()}


class Recorder:
    """Times an engine's steps from within, each at the moment when its loss is known."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._steps: list[dict[str, Any]] = []
        self._last: float | None = None
        self._memory: dict[str, float | None] = {}

    @property
    def done(self) -> bool:
        """True when all steps were recorded; what an engine does after that is not measured."""
        return len(self._steps) >= self._job.total_steps

    def step(self, loss: float, grad_norm: float | None) -> None:
        """One optimizer step is done. Peaks of memory are those of the measured steps."""
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
        """The engine's answer, which rank 0 alone has; `settings` say what it ran with."""
        if int(os.environ.get("RANK", 0)):
            return {}
        if not self.done:
            raise RuntimeError(
                f"took {len(self._steps)} of {self._job.total_steps} steps, then ended by itself"
            )
        return {"steps": self._steps, **self._memory, "settings": settings}


def main(
    run: Callable[[Job], dict[str, Any]],
    *,
    packages: tuple[str, ...],
    ranks: str | None = None,
    packs: bool = True,
    fallback: dict[str, Any] | None = None,
) -> None:
    """Do the job that the command line names, and write result.json into its folder.

    Args:
        run: takes a Job, returns what `Recorder.result` does; raises Skip where it cannot.
        packages: whose versions are told.
        ranks: who starts several ranks: torchrun, which then calls `run` in each; itself, which
            is `run`; or None, and such a job is left out.
        packs: the engine keeps the documents of a packed row apart.
        fallback: settings to try where `run` fails on a GPU without them.
    """
    job = read_job(sys.argv[1])
    if job.ranks > 1 and ranks == "torchrun" and "RANK" not in os.environ:
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={job.ranks}"]
        command = [sys.executable, "-m", *torchrun, "-m", _module(), sys.argv[1]]
        os.execv(sys.executable, command)
    answer: dict[str, Any] = {"status": "ok"}
    try:
        if job.ranks > 1 and ranks is None:
            raise Skip("is run in one process only here")
        if job.documents == "packed" and not packs:
            raise Skip("cannot keep the documents of a packed row apart; try --documents whole")
        answer |= run(job)
    except (Skip, ImportError) as error:
        answer |= {"status": "skipped", "reason": _line(error)}
    except Exception as error:
        traceback.print_exc()
        answer |= failure(
            job, type(error).__name__, _line(error), fallback if job.device == "cuda" else None
        )
    answer["versions"] = {name: version(name) for name in packages}
    if int(os.environ.get("RANK", 0)) == 0:
        write_json(Path(job.out) / RESULT, answer)
    sys.stdout.flush()
    sys.stderr.flush()
    # What an engine leaves running, such as its loaders or ranks of a failed group, ends here.
    os._exit(answer["status"] not in ("ok", "skipped"))


def end(process: subprocess.Popen) -> None:
    """Kill a process that has a session of its own, and all that it started."""
    try:
        # torchrun's ranks have sessions of their own.
        ranks = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        ranks = []
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.kill()
    process.wait()


def failure(
    job: Job, kind: str, message: str, fallback: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The answer of a run that failed, and with which settings it may succeed."""
    if kind == "OutOfMemoryError":
        again = {"activation_checkpointing": True}
        answer = {"status": "out of memory", "reason": message}
    else:
        again = fallback or {}
        answer = {"status": "failed", "reason": f"{kind}: {message}"}
    if again.keys() - job.settings.keys():
        answer["retry_with"] = again
    return answer


def version(package: str) -> str | None:
    """The installed version of a package; None where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def write_json(path: Path, value: Any) -> None:
    """Replace a file by `value`, complete or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def read_job(path: str | Path) -> Job:
    """The job of a job.json."""
    return Job(**json.loads(Path(path).read_text(encoding="utf-8")))


def write_job(job: Job) -> Path:
    """Write job.json into the job's own folder; return its path."""
    path = Path(job.out) / JOB
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(job))
    return path


def _module() -> str:
    return str(sys.modules["__main__"].__spec__.name)


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
