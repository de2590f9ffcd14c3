"""Step checkpoints that are complete or absent.

A checkpoint is written as `.tmp_step_<n>.<attempt>`: a shard a rank, trainer_state.json, a
manifest with the SHA-256 of every file, then the marker COMPLETE. All is flushed to the disk
before the folder is renamed to `step_<n>`. Loading verifies the hashes and falls back to the
checkpoint before where one is damaged.

One thread a rank writes, over a process group of its own. An asynchronous save copies the rank's
part to CPU memory and lets training go on beside the copying and the thread; the next update
waits on the GPU for the copy. Any other save waits for the thread.
"""

import copy
import math
import os
import re
import shutil
import socket
import time
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from trainer.distributed import TIMEOUT, World
from trainer.errors import CheckpointError, ConfigError, TrainerError
from trainer.files import fsync_path, read_json, sha256, write_json, write_text
from trainer.staging import available_bytes, stage, staged_bytes

FOLDER = "checkpoints"
STATE, MANIFEST, COMPLETE = "trainer_state.json", "manifest.json", "COMPLETE"
# LoRA's checkpoints hold the adapter only; the frozen base is read from the model folder again.
TRAINABLE_ONLY = StateDictOptions(ignore_frozen_params=True)
# The kernel needs some memory of its own while files are written.
MEMORY_RESERVE = 1.1
# How long a start that failed waits for the checkpoint that it was writing.
SETTLE_S = 600
# What a key that is in no config means.
HINTS = {
    "samples_per_step": " (batch_size x gradient_accumulation_steps x ranks with their own data)",
    "base_weights": " (checkpointer.checkpoint_dir holds other weights than the adapter's base)",
}
# torch tells everyone to pass a process group or a device where we have passed one.
warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")


@dataclass
class TrainerState:
    """What a resume needs beside tensors. `run` tells whether config and checkpoint agree.

    `val_loss` was measured on the weights of this very step; None where it was not.
    """

    step: int = 0
    tokens: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    val_loss: float | None = None
    skipped_steps: int = 0
    world_size: int = 1
    tensor_parallel_dim: int = 1
    scheduler: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)


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
        self._folder = run_dir / FOLDER
        self._world = world
        # The thread that writes must never meet the training thread in one group.
        group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._writer_world = replace(world, cpu_group=group)
        self._writer = ThreadPoolExecutor(1, "checkpoint", initializer=self._use_own_gpu)
        self._pending: Future[None] | None = None
        self._committed: deque[int] = deque()
        self._attempt = attempt
        self._keep = keep
        self._asynchronous = asynchronous
        self._buffers: Any = None
        self._copied: torch.cuda.Event | None = None
        self._held: torch.optim.Optimizer | None = None
        self.blocked_s = 0.0
        """Seconds for which training has waited for checkpoints, in this start of the run."""

    def steps(self) -> list[int]:
        """The steps of the committed checkpoints, ascending."""
        names = (path.name for path in self._folder.glob("step_*"))
        return sorted(int(m[1]) for name in names if (m := re.fullmatch(r"step_(\d+)", name)))

    def best(self) -> tuple[int, float] | None:
        """(step, val_loss) of the checkpoint with the lowest val_loss; None where none has one."""
        found = []
        for step in self.steps():
            state = read_json(self._folder / f"step_{step}" / STATE) or {}
            loss = state.get("val_loss")
            if loss is not None and math.isfinite(loss):
                found.append((loss, step))
        return min(found)[::-1] if found else None

    def save(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        state: TrainerState,
        wait: bool = True,
    ) -> None:
        """Write the checkpoint of `state.step`; all ranks call this together.

        A save that comes while the last one is still being written waits for that first.

        Args:
            wait: do not let training go on before the checkpoint is committed. Without it a fault
                is raised by the next `save` or `wait`; `failed_here` tells of it earlier.

        Raises:
            TrainerError: the disk is too full, or a newer start of the run has taken over.
            OSError: the disk refused; earlier checkpoints are untouched.
        """
        with self._blocking():
            self._join()
            content = {
                **_tensors(model, optimizer),
                "random": {str(self._world.rank): _random_state()},
            }
            copied = None
            if self._asynchronous and not wait and self._fits(content):
                content, copied = stage(content, self._buffers)
                self._buffers = content
                self._hold_updates(optimizer, copied)
            else:
                wait = True
            self._pending = self._writer.submit(self._write, content, copied, copy.deepcopy(state))
            if wait:
                self._join()

    def wait(self) -> None:
        """Wait for the save that is on its way and raise its fault; all ranks call together."""
        with self._blocking():
            self._join()

    def settle(self) -> None:
        """Let a save that is on its way end, as it may, before this rank gives up."""
        if self._pending is not None:
            wait_for([self._pending], timeout=SETTLE_S)

    def failed_here(self) -> bool:
        """True where the save that is on its way has failed; the ranks must then agree on it."""
        pending = self._pending
        return pending is not None and pending.done() and pending.exception() is not None

    def newly_committed(self) -> list[int]:
        """The steps of the checkpoints that were committed since the last call."""
        return [self._committed.popleft() for _ in range(len(self._committed))]

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
            self._world.agree(pending.result)

    def _fits(self, content: dict[str, Any]) -> bool:
        """Whether every host has the memory for its ranks' copies; asked before the first one."""
        if self._buffers is not None:
            return True
        own = (socket.gethostname(), staged_bytes(content), available_bytes())
        needed: dict[str, int] = {}
        room: dict[str, int] = {}
        for host, size, available in self._world.gather(own):
            needed[host] = needed.get(host, 0) + size
            room[host] = min(available, room.get(host, available))
        short = [host for host in needed if needed[host] * MEMORY_RESERVE > room[host]]
        if short and self._world.is_main:
            host = short[0]
            print(
                f"note: enable_async_checkpointing: {host} has {room[host] >> 20} MiB of memory "
                f"free, a copy of its part takes {needed[host] >> 20} MiB; training waits while "
                "checkpoints are written (resources.mem gives a job more)",
                flush=True,
            )
        self._asynchronous = not short
        return not short

    def _hold_updates(
        self, optimizer: torch.optim.Optimizer, copied: torch.cuda.Event | None
    ) -> None:
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
        world = self._writer_world
        if copied is not None:
            copied.synchronize()
        temporary = self._folder / f".tmp_step_{state.step}.{self._attempt}"
        world.on_main(lambda: self._prepare(temporary))
        try:
            with _plain_errors():
                dcp.save(
                    content,
                    storage_writer=dcp.FileSystemWriter(temporary, sync_files=True),
                    process_group=world.cpu_group,
                )
            own = world.agree(lambda: _hashes(temporary, f"__{world.rank}_*"))
            shards = {name: entry for part in world.gather(own) for name, entry in part.items()}
            world.on_main(lambda: self._commit(temporary, state, shards))
        except Exception:
            if world.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._committed.append(state.step)

    def load(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, run: dict[str, Any]
    ) -> TrainerState | None:
        """Restore the newest sound checkpoint; None where there is none at all.

        Args:
            run: what this start's config says; it must equal what the checkpoint was made with.

        Raises:
            CheckpointError: there are checkpoints and all are damaged.
            ConfigError: the checkpoint belongs to another config.
        """
        world = self._world
        steps = world.gather(self.steps())[0]
        damaged: dict[Path, str] = {}
        for step in reversed(steps):
            folder = self._folder / f"step_{step}"
            fault = self._agreed_fault(folder)
            if fault is None:
                state = self._restore(folder, model, optimizer, run)
                world.on_main(lambda: self._set_aside(damaged))
                return state
            damaged[folder] = fault
        if damaged:
            raise CheckpointError(
                f"every checkpoint of this run is damaged; move {self._folder} away to start "
                "again at step 0\n" + "\n".join(f"{k}: {v}" for k, v in damaged.items())
            )
        return None

    def load_weights(self, step: int, model: torch.nn.Module) -> str | None:
        """Put the weights of the checkpoint of `step` into `model`; all ranks call this together.

        Returns what is wrong with a damaged checkpoint, of which nothing is loaded.
        """
        folder = self._folder / f"step_{step}"
        fault = self._agreed_fault(folder)
        if fault is None:
            content = {"model": get_model_state_dict(model, options=TRAINABLE_ONLY)}
            self._read(folder, content)
            _set_weights(model, content["model"])
        return fault

    def _set_aside(self, damaged: dict[Path, str]) -> None:
        """Rename damaged checkpoints, so that they are neither counted nor lost."""
        for folder, fault in damaged.items():
            print(f"checkpoints/{folder.name} is damaged and set aside: {fault}", flush=True)
            aside = folder.with_name(f"damaged_{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(folder, aside)

    def _prepare(self, temporary: Path) -> None:
        self._check_lease()
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in self._folder.glob(".tmp_step_*"):
            shutil.rmtree(left, ignore_errors=True)
        newest = max(self.steps(), default=None)
        if newest is not None:
            size = sum(p.stat().st_size for p in (self._folder / f"step_{newest}").iterdir())
            free = shutil.disk_usage(self._folder).free
            if free < 2 * size:
                raise TrainerError(
                    f"{self._folder}: {free >> 20} MiB free, a checkpoint takes {size >> 20} MiB "
                    "and twice that must be free; make room, then resume the run"
                )
        temporary.mkdir()

    def _commit(self, temporary: Path, state: TrainerState, shards: dict[str, Any]) -> None:
        write_json(temporary / STATE, asdict(state))
        files = shards | _hashes(temporary, ".metadata") | _hashes(temporary, STATE)
        write_json(temporary / MANIFEST, {"step": state.step, "files": files})
        write_text(temporary / COMPLETE, sha256(temporary / MANIFEST) + "\n")
        fsync_path(temporary)
        self._check_lease()
        os.rename(temporary, self._folder / f"step_{state.step}")
        fsync_path(self._folder)
        best, _ = self.best() or (None, None)
        for step in self.steps()[: -self._keep]:
            if step != best:
                shutil.rmtree(self._folder / f"step_{step}", ignore_errors=True)

    def _check_lease(self) -> None:
        """A lost node may come back and write; only the newest start may commit."""
        newest = (read_json(self._folder.parent / "progress.json") or {}).get("attempt", 0)
        if newest > self._attempt:
            raise TrainerError(
                f"this is start {self._attempt} of the run and start {newest} has taken over; "
                "its checkpoints stand, this one is not written"
            )

    def _agreed_fault(self, folder: Path) -> str | None:
        return next(filter(None, self._world.gather(self._fault(folder))), None)

    def _fault(self, folder: Path) -> str | None:
        """What is wrong with a checkpoint; each rank verifies a share of its files."""
        manifest = read_json(folder / MANIFEST)
        try:
            marker = (folder / COMPLETE).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            return "the marker COMPLETE is missing"
        if manifest is None or sha256(folder / MANIFEST) != marker:
            return "the manifest is missing or changed"
        names = sorted(manifest["files"])
        for name in names[self._world.rank :: self._world.size]:
            entry = manifest["files"][name]
            path = folder / name
            if not path.is_file() or path.stat().st_size != entry["bytes"]:
                return f"{name} is missing or cut short"
            if sha256(path) != entry["sha256"]:
                return f"{name} has changed on the disk"
        return None

    def _restore(
        self,
        folder: Path,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        run: dict[str, Any],
    ) -> TrainerState:
        world = self._world
        state = TrainerState(**read_json(folder / STATE))
        differences = [
            f"{folder}: {difference}"
            for key, value in run.items()
            # A checkpoint of an older version of the trainer knows fewer keys.
            if key in state.run
            for difference in _differences(key, state.run[key], value)
        ]
        if differences:
            raise ConfigError(
                *differences,
                f"{folder}: start a new run for the new values, or restore the old ones",
            )
        tensors = _tensors(model, optimizer)
        layout = (world.size, world.tensor_parallel_dim)
        same_layout = (state.world_size, state.tensor_parallel_dim) == layout
        random = {str(world.rank): _random_state()} if same_layout else {}
        self._read(folder, {**tensors, "random": random})
        _set_weights(model, tensors["model"])
        set_optimizer_state_dict(model, optimizer, tensors["optimizer"], options=TRAINABLE_ONLY)
        for own in random.values():
            _set_random_state(own)
        if not same_layout:
            # Dropout cannot go on as it would have: the ranks see other samples now. A seed of its
            # own keeps them from drawing the masks of the first steps again. The data goes on
            # where it was, for it depends on the step alone.
            seed = (run["seed"] * 1_000_003 + world.rank) * 1_000_003 + state.step
            torch.manual_seed(seed % 2**63)
        return state

    def _read(self, folder: Path, content: dict[str, Any]) -> None:
        """Fill the tensors of `content` with those of a checkpoint of any layout."""
        with _plain_errors():
            dcp.load(
                content,
                storage_reader=dcp.FileSystemReader(folder),
                process_group=self._world.cpu_group,
            )


def _differences(name: str, made_with: Any, now: Any) -> list[str]:
    """One line for each value that differs, by its dotted key."""
    if isinstance(made_with, dict) and isinstance(now, dict):
        return [
            line
            for key in dict.fromkeys([*now, *made_with])
            for line in _differences(f"{name}.{key}", made_with.get(key), now.get(key))
        ]
    if made_with == now:
        return []
    return [f"made with {name}={made_with!r}, the config says {now!r}{HINTS.get(name, '')}"]


def _set_weights(model: torch.nn.Module, tensors: dict[str, Any]) -> None:
    options = StateDictOptions(ignore_frozen_params=True, strict=False)
    set_model_state_dict(model, tensors, options=options)


@contextmanager
def _plain_errors():
    """Turn torch's checkpoint error, which is no Exception, into the OSError that it was."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if isinstance(cause, OSError) and cause.errno:
            raise OSError(cause.errno, f"checkpoint on rank {rank}: {cause.strerror}") from cause
        # torch's own writer covers what the system said.
        raise RuntimeError(
            f"checkpoint on rank {rank} failed, look at the disk's space and quota first: {cause}"
        ) from cause


def _tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model, options=TRAINABLE_ONLY),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=TRAINABLE_ONLY),
    }


def _hashes(folder: Path, pattern: str) -> dict[str, dict[str, Any]]:
    return {
        path.name: {"sha256": sha256(path), "bytes": path.stat().st_size}
        for path in sorted(folder.glob(pattern))
    }


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
