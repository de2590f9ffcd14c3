"""FLOPs, time and memory of steps; metrics.jsonl, TensorBoard, and the lines that people read.

`runspec.flops` has the convention by which FLOPs are counted, and the count.
"""

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from torch import nn

from runspec import files, flops
from runspec.storage import patiently
from trainer.checkpoint.weights import named_parameters
from trainer.layers import nf4
from trainer.layers.attention import DocumentAttention
from trainer.layers.linear import AdaptedLinear
from trainer.model import Decoder

GIB = 2**30
GPUS = Path(__file__).parents[1] / "configs/gpus.yaml"
T = TypeVar("T")
# TensorBoard shows groups in the order of the alphabet: the loss comes first. What stands in none
# is in "more".
_GROUPS = {
    "loss": ("loss", "loss_mean", "val_loss"),
    "rewards": ("reward", "reward_std", "val_reward"),
    "policy": ("entropy", "kl"),
    "memory": ("peak_memory_allocated_gb", "peak_memory_reserved_gb", "memory_rss_gb"),
    "optimizer": ("lr", "grad_norm", "skipped_steps"),
    "progress": ("epoch", "tokens"),
    "routers": ("router_aux_loss", "router_entropy", "expert_load_max", "expert_load_min"),
    "speed": (
        "tokens_per_second_per_gpu",
        "tflops_per_second_per_gpu",
        "mfu",
        "step_time_s",
        "data_wait_s",
        "checkpoint_blocked_s",
    ),
}
_TAGS = {name: f"{group}/{name}" for group, names in _GROUPS.items() for name in names}


def memory(device: torch.device) -> dict[str, float]:
    """This process's peak GPU memory since the last call, and its resident memory, in GiB.

    The GPU figures are 0 on a CPU.
    """
    allocated = reserved = 0
    if device.type == "cuda":
        allocated = torch.cuda.max_memory_allocated(device)
        reserved = torch.cuda.max_memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
    resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return {
        "peak_memory_allocated_gb": allocated / GIB,
        "peak_memory_reserved_gb": reserved / GIB,
        "memory_rss_gb": resident * os.sysconf("SC_PAGE_SIZE") / GIB,
    }


def lines_until(path: Path, step: int) -> list[dict[str, Any]]:
    """The lines of a file of steps up to this one; what is no such line is left out."""
    lines = patiently(files.read_json_lines, path)
    return [line for line in lines if isinstance(n := line.get("step"), int) and n <= step]


class Metrics:
    """Writes a run's metrics from rank 0.

    Lines and scalars after `resumed_step` belong to work that was lost, and are dropped, so that
    both read as one uninterrupted run.
    """

    def __init__(self, run_dir: Path, resumed_step: int) -> None:
        path = run_dir / files.METRICS
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = lines_until(path, resumed_step)
        files.write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._folder, self._resumed_step = run_dir / files.TENSORBOARD, resumed_step

    @cached_property
    def _board(self) -> Any:
        # Its import takes longer than that of everything else, and the first step needs none.
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self._folder), purge_step=self._resumed_step + 1, flush_secs=10)

    def write(self, record: dict[str, Any]) -> None:
        """Append one logged step; `record["step"]` counts from 1."""
        self._file.write(json.dumps(record) + "\n")
        board = self._board
        from tensorboard.compat.proto.summary_pb2 import Summary

        # A method may name a group of its own before a slash.
        tags = {name: name if "/" in name else f"more/{name}" for name in record} | _TAGS
        values = [
            Summary.Value(tag=tags[name], simple_value=value)
            for name, value in record.items()
            if name not in ("step", "time", "left_s") and value is not None
        ]
        # One event for all: each wakes the thread that writes them.
        board.file_writer.add_summary(Summary(value=values), record["step"])

    def flush(self) -> None:
        """Bring everything written so far to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        if "_board" in vars(self):
            self._board.flush()

    def close(self) -> None:
        """Flush and close."""
        self.flush()
        self._file.close()
        if "_board" in vars(self):
            self._board.close()


def model_flops(model: Decoder, frozen: bool = False) -> flops.ModelFlops:
    """What `model` needs, sharded or not, with the parameters trained that require a gradient.

    Args:
        frozen: a forward pass alone, without adapters.
    """
    heads = (model.score_head, model.output_head, model.embedding)
    output = next(head for head in heads if head is not None)
    prefix = next(name for name, module in model.named_modules() if module is model.blocks)
    linear, shares, width = model.linear_layers(), model.expert_shares(), model.sizes()["num_heads"]
    parameters, kind = dict(named_parameters(model)), model.adapter
    # What an adapter adds to blocks is in no linear layer.
    flows = kind is not None and bool(kind.declared.parts_of("block", "model"))
    flows = flows or any(p.requires_grad for p in model.embedding.parameters())
    total = flops.ModelFlops(0.0, _linear(output, not frozen, frozen), 0.0)
    for number, block in enumerate(model.blocks):
        start = f"{prefix}.{number}."
        flows = flows or any(p.requires_grad for p in block.parameters())
        backward = flows and not frozen
        layers = (model.get_submodule(name) for name in linear if name.startswith(start))
        token = sum(_linear(layer, backward, frozen) for layer in layers)
        for name, share in shares.items():
            if name.startswith(start):
                token += _expert(name, share, parameters, backward, frozen)
        for name, module in block.named_modules(prefix=start[:-1]):
            token += flops.recurrence(model.recurrent_state(name), backward)
            if isinstance(module, DocumentAttention):
                both = width * (module.head_dim + module.value_dim) / 2
                total += flops.attention(both, module.window, backward)
        total += flops.ModelFlops(token, 0.0, 0.0)
    return total


def _expert(
    name: str, share: float, parameters: dict[str, nn.Parameter], backward: bool, frozen: bool
) -> float:
    """FLOPs of the part of the experts' weights, or of a router's, that one token meets."""
    weight = parameters[name]
    owner, _, last = name.rpartition(".")
    added = (p for n, p in parameters.items() if n.startswith(f"{owner}.adapters.{last}."))
    adapter = 0.0 if frozen else share * sum(p.numel() for p in added)
    return flops.linear(share * nf4.dense_numel(weight), weight.requires_grad, adapter, backward)


def _linear(module: nn.Module, backward: bool, frozen: bool) -> float:
    """FLOPs of a linear layer with an adapter or not."""
    weight = module.weight
    adapter = sum(module.products) if isinstance(module, AdaptedLinear) and not frozen else 0.0
    return flops.linear(nf4.dense_numel(weight), weight.requires_grad, adapter, backward)


def peak_tflops(device: torch.device) -> float | None:
    """The data sheet's dense bf16 TFLOP/s of this GPU; None on a CPU and an unknown GPU.

    Source: configs/gpus.yaml, the first entry whose `match` the driver's name contains.
    """
    if device.type != "cuda" or not GPUS.is_file():
        return None
    return known_tflops(torch.cuda.get_device_name(device))


def known_tflops(name: str) -> float | None:
    """As `peak_tflops`, by the name that the driver gives to a GPU.

    Of an instance of a GPU (MIG) it is not known: the name has the whole GPU's, and both sizes.
    """
    if " MIG " in name:
        return None
    known = yaml.safe_load(GPUS.read_text(encoding="utf-8")).values()
    matching = (each for each in known if re.search(each["match"], name, re.IGNORECASE))
    return next((float(each["bf16_tflops"]) for each in matching), None)


@dataclass
class Work:
    """Time and work of some steps over all ranks; `tokens` are real ones, padding is none."""

    steps: int = 0
    tokens: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0
    data_wait_s: float = 0.0

    def rates(self, gpus: int, peak_tflops: float | None) -> dict[str, float | None]:
        """Tokens/s and model TFLOP/s, both of all ranks divided by all GPUs, and MFU.

        Args:
            gpus: all of them, also those that share a sample by tensor parallelism.
            peak_tflops: one GPU's; None if it is not known, MFU is then None too.
        """
        seconds = max(self.seconds, 1e-9)
        tflops = flops.tflops_per_gpu(self.flops, seconds, gpus)
        return {
            "tokens_per_second_per_gpu": round(self.tokens / seconds / gpus, 1),
            "tflops_per_second_per_gpu": float(f"{tflops:.4g}"),
            "mfu": None if peak_tflops is None else round(tflops / peak_tflops, 4),
        }


# Steps from which the pace is known.
PACED = 4


class Clock:
    """Time and work of steps, without the time in which checkpoints were written.

    Args:
        step: the last step that was done before the clock starts.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._lap_began = time.perf_counter()
        # Step and time from which on the pace counts: the first steps are compiled.
        self._steady: tuple[int, float] | None = None
        self._paused_s = 0.0
        self._lap = Work()
        self.total = Work()

    def waiting(self, batches: Iterator[T]) -> Iterator[T]:
        """The same batches; the time until each is there is counted."""
        began = time.perf_counter()
        for batch in batches:
            self._lap.data_wait_s += time.perf_counter() - began
            yield batch
            began = time.perf_counter()

    def add(self, tokens: float, flops: float) -> None:
        """Count one step's tokens and model FLOPs, over all ranks."""
        self._lap.steps += 1
        self._lap.tokens += tokens
        self._lap.flops += flops

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is not the time of a step."""
        began = time.perf_counter()
        yield
        self._paused_s += time.perf_counter() - began

    def lap(self) -> Work:
        """The work since the last lap; the device must have done it."""
        now = time.perf_counter()
        lap, total = self._lap, self.total
        lap.seconds = max(now - self._lap_began - self._paused_s, 1e-9)
        self._step += lap.steps
        self._steady = self._steady or (self._step, now)
        for field in fields(Work):
            setattr(total, field.name, getattr(total, field.name) + getattr(lap, field.name))
        self._lap, self._lap_began, self._paused_s = Work(), now, 0.0
        return lap

    def left(self, last: int) -> float | None:
        """Seconds from the newest lap to step `last`, at the mean pace since the first lap.

        Checkpoints are included; None while the pace is that of fewer than PACED steps.
        """
        if self._steady is None or self._step - self._steady[0] < PACED:
            return None
        begin, began = self._steady
        return (last - self._step) * (self._lap_began - began) / (self._step - begin)


def progress_line(record: dict[str, Any], total_steps: int, epochs: int) -> str:
    """One aligned line of plain text for a log file."""
    width = len(str(total_steps))
    gpu = record["peak_memory_reserved_gb"]
    memory_gb = record["memory_rss_gb"] if gpu is None else gpu
    mfu = "" if record["mfu"] is None else f"MFU {100 * record['mfu']:4.1f} %  "
    validation = f"val loss {_number(record['val_loss'], 8, 4)}  " if "val_loss" in record else ""
    # A step that trains on the answers of the one before it has no new one.
    reward = "" if record.get("reward") is None else f"reward {record['reward']:6.3f}  "
    if reward and record.get("answers/tokens") is not None:
        reward += f"{record['answers/tokens']:.0f} tok/answer, {record['answers/cut']:.0%} cut  "
        reward += f"entropy {_number(record['entropy'], 0, 2)}  "
    if reward and record.get("staleness") is not None:
        reward += f"staleness {record['staleness']:.2f}  "
    left = "" if record["left_s"] is None else f"  left {duration(record['left_s'])}"
    return (
        f"step {record['step']:>{width}}/{total_steps}  "
        f"epoch {record['epoch']:>{len(str(epochs))}}/{epochs}  "
        f"loss {_number(record['loss'], 8, 4)}  {reward}{validation}lr {record['lr']:.2e}  "
        f"grad norm {_number(record['grad_norm'], 8, 3)}  "
        f"{record['tokens_per_second_per_gpu']:>8,.0f} tok/s/GPU  {mfu}"
        f"mem {memory_gb:5.1f} GiB{left}"
    )


def _number(value: float | None, width: int, digits: int) -> str:
    """A figure of a fixed width; None is one that was not finite."""
    return "nan".rjust(width) if value is None else f"{value:{width}.{digits}f}"


def duration(seconds: float) -> str:
    """Seconds as 1:02:03 or 02:03."""
    minutes, second = divmod(round(max(0.0, seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute:02}:{second:02}"
