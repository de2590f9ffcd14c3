"""The ranks of one run: who they are, what they do together, and when they are asked to stop."""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from runspec.layout import Layout, LayoutError
from trainer.errors import ConfigError, Fault, PeerError
from trainer.parallel.device import agree, own

T = TypeVar("T")
# Long enough for one rank to read or write a large model while the others wait.
TIMEOUT = timedelta(minutes=30)
# Bytes per second, all ranks together: storage that is slower than this fails.
SLOWEST_READ = 20e6


@dataclass(frozen=True)
class World:
    """This process among all ranks."""

    rank: int
    # Number of ranks.
    size: int
    # The rank on its node.
    local_rank: int
    device: torch.device
    # Carries small messages over gloo, so that they never wait for the GPU.
    cpu_group: dist.ProcessGroup
    # How the ranks divide the work.
    layout: Layout
    # By their dimensions, those that were made.
    meshes: dict[tuple[str, ...], DeviceMesh] = field(default_factory=dict)

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes what exists once."""
        return self.rank == 0

    @property
    def tensor_parallel_dim(self) -> int:
        """Number of neighbouring ranks that split each layer, and see the same data."""
        return self.layout.tensor_parallel

    @property
    def data_rank(self) -> int:
        """Which of the groups of ranks that see different data this rank belongs to."""
        return self.rank // self.tensor_parallel_dim

    @property
    def data_weight(self) -> int:
        """1 on one rank of each group and 0 on the others, so that sums count data once."""
        return int(self.rank == self.group_leader)

    @property
    def group_leader(self) -> int:
        """The first of the ranks that see the same data as this one."""
        return self.data_rank * self.tensor_parallel_dim

    def say(self, text: str) -> None:
        """Print a line on rank 0 only, at once."""
        if self.is_main:
            print(text, flush=True)

    def mesh(self, fsdp: bool) -> DeviceMesh | None:
        """Return the ranks as a mesh (dp_replicate, dp_shard, tp); None for one rank without FSDP.

        Dimensions of size 1 are left out, except dp_shard if FSDP is used. The ranks lie as
        runspec.layout says.
        """
        layout = self.layout
        sizes = (layout.replicate, layout.shard, layout.tensor_parallel)
        named = zip(("dp_replicate", "dp_shard", "tp"), sizes, strict=True)
        return self._mesh({n: s for n, s in named if s > 1 or (fsdp and n == "dp_shard")})

    def replicas(self) -> DeviceMesh | None:
        """Return the mesh of a rank's replicas if each has a whole model; None if it is the one."""
        mesh = self.mesh(False) if self.layout.replicate > 1 and self.layout.shard == 1 else None
        return None if mesh is None else mesh["dp_replicate"]

    def expert_mesh(self, fsdp: bool) -> DeviceMesh | None:
        """Return the ranks as the experts see them: (dp_replicate, ep_shard, ep).

        None without expert parallelism. Ranks along ep have different experts, and those along
        ep_shard shard the same ones; dp_replicate is left out if it is 1, ep_shard without FSDP.
        """
        layout = self.layout
        if layout.expert_parallel == 1:
            return None
        named = {
            "dp_replicate": layout.replicate,
            "ep_shard": layout.shard * layout.tensor_parallel // layout.expert_parallel,
            "ep": layout.expert_parallel,
        }
        return self._mesh({n: s for n, s in named.items() if s > 1 or (fsdp and n == "ep_shard")})

    def _mesh(self, sizes: dict[str, int]) -> DeviceMesh | None:
        if not sizes:
            return None
        # Each mesh makes a process group for each dimension: those that are asked for again exist.
        device, names = self.device.type, tuple(sizes)
        if names not in self.meshes:
            shape = tuple(sizes.values())
            self.meshes[names] = init_device_mesh(device, shape, mesh_dim_names=names)
        return self.meshes[names]

    def limit(self, seconds: float | None) -> None:
        """Let collectives that begin from now on time out after so long; None: after TIMEOUT."""
        timeout = TIMEOUT if seconds is None else timedelta(seconds=seconds)
        groups = [dist.group.WORLD, self.cpu_group]
        groups += [group for mesh in self.meshes.values() for group in mesh.get_all_groups()]
        for group in groups:
            group.set_timeout(timeout)

    def limit_for(self, size: int) -> None:
        """Let collectives wait for ranks that read this many bytes between them."""
        self.limit(max(TIMEOUT.total_seconds(), size / SLOWEST_READ))

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over all ranks, in float64."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def max(self, values: list[float]) -> list[float]:
        """Element-wise maximum over all ranks, in float64."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: Sequence[float], operation: dist.ReduceOp) -> list[float]:
        if self.size == 1:
            return [float(value) for value in values]
        reduced = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(reduced, operation, self.cpu_group)
        return reduced.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.cpu_group)
        return values

    def on_all(self, task: Callable[[], T]) -> T:
        """Run `task` on every rank; if it fails on any of them, raise on all of them.

        Without this the ranks that did not fail would wait for the one that did.
        """
        fault: Exception | None = None
        try:
            result = task()
        except Exception as error:
            fault = error
        faults = self.gather(None if fault is None else Fault.of(fault))
        if fault is not None:
            raise fault
        if failed := {rank: text for rank, text in enumerate(faults) if text}:
            raise PeerError(failed)
        return result

    def on_main(self, task: Callable[[], T]) -> T | None:
        """Run `task` on rank 0 only; its fault is raised on every rank."""
        return self.on_all(lambda: task() if self.is_main else None)

    def from_main(self, task: Callable[[], T]) -> T:
        """Run `task` on rank 0 only; every rank returns its result, or raises its fault."""
        values: list[Any] = [self.on_main(task)]
        dist.broadcast_object_list(values, src=0, group=self.cpu_group)
        result: T = values[0]
        return result


def layout_of(config: Mapping[str, Any], ranks: int) -> Layout:
    """Return the layout of this many ranks; raises ConfigError with every fault.

    Args:
        config: tensor_parallel_dim, data_parallel_replicate_dim and the like.
    """
    try:
        return Layout.of(config, ranks)
    except LayoutError as error:
        raise ConfigError(*error.faults) from None


def start(device: str, config: Mapping[str, Any] | None = None) -> World:
    """Join the process group that torchrun describes, or a world of one without torchrun.

    Args:
        device: auto, cuda or cpu. cuda talks over NCCL, and over gloo for what is on the CPU.
        config: see `layout_of`; without it FSDP shards one replica over all ranks.

    Raises:
        ConfigError: GPUs cannot be used or are fewer than local ranks, or a layout that does not
            fit the number of ranks.
        BadNodeError, PeerError: see `agree`.
    """
    rank = int(os.environ.get("RANK", 0))
    size = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    layout = layout_of(config or {}, size)
    where, backend = own(device), "gloo"
    if where.type == "cuda":
        backend = "cuda:nccl,cpu:gloo"
        _start_backward_thread(where)
    elif "OMP_NUM_THREADS" not in os.environ:
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))
    store: dist.Store = dist.HashStore()
    if "RANK" in os.environ:
        store, _, _ = next(dist.rendezvous("env://", timeout=TIMEOUT))
        agree(where.type, store, rank, size)
    # With the GPU named, a mesh splits NCCL's communicator once per dimension. Else all ranks make
    # every group of it one after the other, hundreds for 512 ranks. One rank needs no communicator.
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
        device_id=where if where.type == "cuda" and size > 1 else None,
    )
    cpu_group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    return World(rank, size, local_rank, where, cpu_group, layout)


def _start_backward_thread(device: torch.device) -> None:
    """Start the thread of the device's backward passes, with as many CPU threads as this one has.

    torch's loader sets 1 for all threads that ask for it after its own one has started. What is
    compiled is compiled again for another number: for a layer that is computed again.
    """
    first = torch.zeros((), device=device, requires_grad=True)
    first.register_hook(_ask_for_threads)
    first.backward()


def _ask_for_threads(_: torch.Tensor) -> None:
    torch.get_num_threads()


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
        """True if this rank was asked; it must then inform the other ranks."""
        return self._signalled or (self._file is not None and self._file.exists())

    def clear(self) -> None:
        """Remove the request once it is honoured, so that the next start goes on."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
