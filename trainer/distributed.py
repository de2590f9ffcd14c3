"""The ranks of one run: who they are, how they agree, and when they are asked to stop."""

import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trainer.errors import ConfigError, PeerError, is_permanent

T = TypeVar("T")
# Long enough for one rank to read or write a large model while the others wait.
TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class World:
    """This process among all ranks.

    `cpu_group` carries small agreements over gloo, so that they never wait for the GPU.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    cpu_group: dist.ProcessGroup
    tensor_parallel_dim: int = 1
    replicate_dim: int = 1

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes what exists once."""
        return self.rank == 0

    @property
    def data_size(self) -> int:
        """Number of groups of ranks that see different data."""
        return self.size // self.tensor_parallel_dim

    @property
    def shard_dim(self) -> int:
        """Over how many of these groups one copy of the model is sharded."""
        return self.data_size // self.replicate_dim

    @property
    def data_rank(self) -> int:
        """Which of these groups this rank belongs to; neighbours in rank share one."""
        return self.rank // self.tensor_parallel_dim

    @property
    def data_weight(self) -> int:
        """1 on one rank of each group and 0 on the others, so that sums count data once."""
        return int(self.rank % self.tensor_parallel_dim == 0)

    def sum(self, values: list[float]) -> list[float]:
        """Element-wise sum over all ranks, in float64."""
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.cpu_group)
        return total.tolist()

    def max(self, values: list[float]) -> list[float]:
        """Element-wise maximum over all ranks, in float64."""
        highest = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.cpu_group)
        return highest.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.cpu_group)
        return values

    def agree(self, task: Callable[[], T]) -> T:
        """Run `task` on every rank; where it fails on any of them, raise on all of them.

        Without this the ranks that did not fail would wait for the one that did.
        """
        fault: Exception | None = None
        result = None
        try:
            result = task()
        except Exception as error:
            fault = error
        faults = self.gather(None if fault is None else (_one_line(fault), is_permanent(fault)))
        if fault is not None:
            raise fault
        failed = {rank: found for rank, found in enumerate(faults) if found}
        if failed:
            texts = "; ".join(f"rank {rank}: {text}" for rank, (text, _) in failed.items())
            raise PeerError(f"another rank failed: {texts}", any(p for _, p in failed.values()))
        return result  # type: ignore[return-value]

    def on_main(self, task: Callable[[], T]) -> T | None:
        """Run `task` on rank 0 only; its fault is raised on every rank."""
        return self.agree(lambda: task() if self.is_main else None)


def _one_line(error: Exception) -> str:
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[0]


def start(
    device: str,
    tensor_parallel_dim: int = 1,
    replicate_dim: int = 1,
    shard_dim: int = -1,
) -> World:
    """Join the process group that torchrun describes, or a world of one without torchrun.

    Args:
        device: auto, cuda or cpu. cuda talks over NCCL, and over gloo for what is on the CPU.
        tensor_parallel_dim: how many neighbouring ranks split each layer.
        replicate_dim: how many copies of the model there are.
        shard_dim: over how many tensor-parallel groups each copy is sharded; -1: all that are left.

    Raises:
        ConfigError: cuda is asked for and not there, fewer GPUs than local ranks, or a number of
            ranks that is not the product of the three dimensions.
    """
    rank = int(os.environ.get("RANK", 0))
    size = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if size % tensor_parallel_dim:
        raise ConfigError(
            f"tensor_parallel_dim: {tensor_parallel_dim} does not divide the {size} ranks of this "
            "run; set tensor_parallel_dim to a number that does, or change the number of GPUs"
        )
    _check_data_dims(size // tensor_parallel_dim, replicate_dim, shard_dim)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        _check_gpu(local_rank)
        torch.cuda.set_device(local_rank)
        where = torch.device("cuda", local_rank)
        backend = "cuda:nccl,cpu:gloo"
    else:
        where = torch.device("cpu")
        backend = "gloo"
        if "OMP_NUM_THREADS" not in os.environ:
            local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=TIMEOUT)
    else:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=TIMEOUT)
    cpu_group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    return World(rank, size, local_rank, where, cpu_group, tensor_parallel_dim, replicate_dim)


def _check_data_dims(groups: int, replicate_dim: int, shard_dim: int) -> None:
    if shard_dim == -1 and groups % replicate_dim:
        raise ConfigError(
            f"data_parallel_replicate_dim: {replicate_dim} does not divide the {groups} "
            "data-parallel groups of this run; set it to a number that does"
        )
    if shard_dim != -1 and replicate_dim * shard_dim != groups:
        raise ConfigError(
            f"data_parallel_shard_dim: {replicate_dim} copies x {shard_dim} shards are not the "
            f"{groups} data-parallel groups of this run; set data_parallel_shard_dim=-1 for what "
            "is left"
        )


def _check_gpu(local_rank: int) -> None:
    if not torch.cuda.is_available():
        raise ConfigError("device: cuda is asked for, but this host shows no GPU; set device=auto")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"device: local rank {local_rank} needs GPU {local_rank}, but this host shows "
            f"{torch.cuda.device_count()}; lower resources.gpus_per_node"
        )


def stop() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


class StopRequest:
    """Asks to stop: the file `.stop` in the run directory, or SIGTERM at any rank."""

    def __init__(self, world: World, run_dir: Path) -> None:
        self._file = run_dir / ".stop" if world.is_main else None
        self._signalled = False
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        self._signalled = True

    def seen_here(self) -> bool:
        """True where this rank was asked; the ranks must then agree on it."""
        return self._signalled or (self._file is not None and self._file.exists())

    def clear(self) -> None:
        """Take the request away once it is honoured, so that the next start goes on."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
