"""Saving and loading checkpoints on all ranks, beside the training if the config says so.

One thread per rank writes, over a process group of its own. An asynchronous save copies the
rank's part to CPU memory and lets training go on while the copy is made and written; the next
update waits on the GPU for the copy. Any other save waits for the thread.
"""

import copy
import shutil
import socket
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from trainer.checkpoint.committed import CommittedCheckpoints, TrainerState, hashes
from trainer.checkpoint.staging import available_bytes, stage, staged_bytes
from trainer.errors import CheckpointError
from trainer.parallel.world import TIMEOUT, World

# The kernel needs some memory of its own while files are written.
MEMORY_RESERVE = 1.1
# How long a start that failed waits for the checkpoint that it was writing.
SETTLE_S = 600


class Checkpoints:
    """The checkpoints of one run directory.

    Args:
        attempt: the number of this start; an older start never overwrites a newer one's work.
        keep: how many of the newest are kept, beside the best one.
        asynchronous: let training go on while a checkpoint is written, from a copy in CPU memory.
    """

    def __init__(
        self, run_dir: Path, world: World, attempt: int, keep: int, asynchronous: bool = False
    ) -> None:
        self.committed = CommittedCheckpoints(run_dir, attempt, keep)
        self._world = world
        # The thread that writes must never meet the training thread in one group.
        group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._writer_world = replace(world, cpu_group=group)
        self._writer = futures.ThreadPoolExecutor(1, "checkpoint", initializer=self._use_own_gpu)
        self._pending: futures.Future[None] | None = None
        self._news: deque[int] = deque()
        self._asynchronous = asynchronous
        self._buffers: Any = None
        self._copied: torch.cuda.Event | None = None
        self._held: Optimizer | None = None
        self.blocked_s = 0.0
        """Seconds for which training has waited for checkpoints, in this start of the run."""

    def save(
        self, model: nn.Module, optimizer: Optimizer, state: TrainerState, wait: bool = True
    ) -> None:
        """Write the checkpoint of `state.step`; all ranks call this together.

        A save that comes while the last one is still being written waits for that first.

        Args:
            wait: do not let training go on before the checkpoint is committed. Without it a fault
                is raised by the next `save` or `wait`; `failed_here` reports it earlier.

        Raises:
            TrainerError: the disk is too full, or a newer start of the run has taken over.
            OSError: the disk refused; earlier checkpoints are untouched.
        """
        from trainer.checkpoint import sharded

        with self._blocking():
            self._join()
            content = sharded.content(model, optimizer, self._world.rank)
            copied, beside = None, self._asynchronous and not wait and self._fits(content)
            if beside:
                content, copied = stage(content, self._buffers)
                self._buffers = content
                self._hold_updates(optimizer, copied)
            self._pending = self._writer.submit(self._write, content, copied, copy.deepcopy(state))
            if not beside:
                self._join()

    def wait(self) -> None:
        """Wait for the save that is being written and raise its fault; all ranks call together."""
        with self._blocking():
            self._join()

    def release(self) -> None:
        """Free the copy that asynchronous saves have used; there is no save after this."""
        self._buffers = self._held = self._copied = None

    def settle(self) -> None:
        """Let a save that is being written end before this rank gives up; its fault is ignored."""
        if self._pending is not None:
            futures.wait([self._pending], timeout=SETTLE_S)

    def failed_here(self) -> bool:
        """True if the save that is being written has failed; the ranks must then agree on it."""
        pending = self._pending
        return pending is not None and pending.done() and pending.exception() is not None

    def newly_committed(self) -> list[int]:
        """The steps of the checkpoints that were committed since the last call."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def load(
        self, model: nn.Module, optimizer: Optimizer, run: dict[str, Any]
    ) -> TrainerState | None:
        """Restore the newest sound checkpoint; None if there is no checkpoint at all.

        The optimizer's hyperparameters stay those of the config.

        Args:
            run: what this start's config says; it must equal what the checkpoint was made with.

        Raises:
            CheckpointError: there are checkpoints and all are damaged.
            StorageError: one cannot be read, which says nothing about it.
            ConfigError: the checkpoint belongs to another config.
        """
        world = self._world
        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            fault = self._agreed_fault(step)
            if fault is None:
                state = self._restore(step, model, optimizer, run)
                world.on_main(lambda: self.committed.rename_damaged(damaged))
                return state
            damaged[step] = fault
        if damaged:
            raise CheckpointError(
                f"every checkpoint of this run is damaged; move {self.committed.folder} away to "
                "start again at step 0\n"
                + "\n".join(f"{self.committed.of(step)}: {f}" for step, f in damaged.items())
            )
        return None

    def steps(self) -> list[int]:
        """The steps of the committed checkpoints as rank 0 sees them; all ranks call together."""
        return self._world.from_main(self.committed.steps)

    def load_weights(self, step: int, model: nn.Module) -> str | None:
        """Put the weights of the checkpoint of `step` into `model`; all ranks call this together.

        Returns what is wrong with a damaged checkpoint, of which nothing is loaded.
        """
        from trainer.checkpoint import sharded

        fault = self._agreed_fault(step)
        if fault is None:
            sharded.restore_weights(self.committed.of(step), model, self._world)
        return fault

    @contextmanager
    def _blocking(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.blocked_s += time.perf_counter() - began

    def _join(self) -> None:
        pending, self._pending = self._pending, None
        if self._world.gather(pending is not None)[0]:
            self._world.on_all(lambda: _written(pending))

    def _fits(self, content: dict[str, Any]) -> bool:
        """Whether every host has the memory for its ranks' copies; asked before the first one."""
        if self._buffers is not None:
            return True
        own = (socket.gethostname(), staged_bytes(content), available_bytes())
        needed, room = Counter[str](), dict[str, int]()
        for host, size, available in self._world.gather(own):
            needed[host] += size
            room[host] = min(available, room.get(host, available))
        if short := [host for host in needed if needed[host] * MEMORY_RESERVE > room[host]]:
            host = short[0]
            self._world.say(
                f"note: enable_async_checkpointing: {host} has {room[host] >> 20} MiB of memory "
                f"free, a copy of its part takes {needed[host] >> 20} MiB; training waits while "
                "checkpoints are written (resources.mem gives a job more)"
            )
        self._asynchronous = not short
        return not short

    def _hold_updates(self, optimizer: Optimizer, copied: torch.cuda.Event | None) -> None:
        """Let the device, not this thread, wait for the copy before the next update changes it.

        The next forward and backward pass need not wait: they only read what is copied.
        """
        self._copied = copied
        if self._held is not optimizer:
            self._held = optimizer
            optimizer.register_step_pre_hook(self._await_copy)

    def _await_copy(self, *_: Any) -> None:
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
            self._copied = None

    def _use_own_gpu(self) -> None:
        # A new thread begins on GPU 0, and would take memory there for nothing.
        if self._world.device.type == "cuda":
            torch.cuda.set_device(self._world.device)

    def _write(
        self, content: dict[str, Any], copied: torch.cuda.Event | None, state: TrainerState
    ) -> None:
        """Write and commit one checkpoint; runs on the writer's thread of every rank."""
        from trainer.checkpoint import sharded

        world, committed = self._writer_world, self.committed
        if copied is not None:
            copied.synchronize()
        temporary = committed.temporary(state.step)
        world.on_main(lambda: committed.prepare(state.step))
        try:
            sharded.write(temporary, content, world.cpu_group)
            own = world.on_all(lambda: hashes(temporary, f"__{world.rank}_*"))
            shards = {name: entry for part in world.gather(own) for name, entry in part.items()}
            world.on_main(lambda: committed.commit(state, shards))
        except Exception:
            if world.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._news.append(state.step)

    def _agreed_fault(self, step: int) -> str | None:
        """What any rank finds wrong with a checkpoint; each verifies a share of its files."""
        world = self._world
        own = world.on_all(lambda: self.committed.fault(step, world.rank, world.size))
        return next(filter(None, world.gather(own)), None)

    def _restore(
        self, step: int, model: nn.Module, optimizer: Optimizer, run: dict[str, Any]
    ) -> TrainerState:
        from trainer.checkpoint import sharded

        world, folder = self._world, self.committed.of(step)
        state = world.on_all(lambda: self.committed.state(step))
        state.check_identity(run)
        layout = (world.size, world.tensor_parallel_dim)
        same_layout = (state.world_size, state.tensor_parallel_dim) == layout
        rank = world.rank if same_layout else None
        sharded.restore(folder, model, optimizer, world, rank)
        if not same_layout:
            # Dropout cannot go on as it would have: the ranks see other samples now. A seed of its
            # own keeps them from drawing the masks of the first steps again. The data goes on
            # where it was, for it depends on the step alone.
            seed = (run["seed"] * 1_000_003 + world.rank) * 1_000_003 + state.step
            torch.manual_seed(seed % 2**63)
        return state


def _written(pending: futures.Future[None] | None) -> None:
    """Wait for a save and raise its fault."""
    if pending is None:
        raise RuntimeError("rank 0 waits for a save that this rank has not begun")
    pending.result()
