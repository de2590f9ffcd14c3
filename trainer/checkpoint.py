"""Step checkpoints that are complete or absent.

A checkpoint is written as `.tmp_step_<n>.<attempt>`: a shard a rank, trainer_state.json, a
manifest with the SHA-256 of every file, then the marker COMPLETE. All is flushed to the disk
before the folder is renamed to `step_<n>`. Loading verifies the hashes and falls back to the
checkpoint before where one is damaged.
"""

import os
import re
import shutil
import warnings
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from trainer.distributed import World
from trainer.errors import CheckpointError, ConfigError, TrainerError
from trainer.files import fsync_path, read_json, sha256, write_json, write_text

FOLDER = "checkpoints"
STATE, MANIFEST, COMPLETE = "trainer_state.json", "manifest.json", "COMPLETE"
# LoRA's checkpoints hold the adapter only; the frozen base is read from the model folder again.
TRAINABLE_ONLY = StateDictOptions(ignore_frozen_params=True)
# torch tells everyone to pass a process group or a device where we have passed one.
warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")


@dataclass
class TrainerState:
    """What a resume needs beside tensors. `run` tells whether config and checkpoint agree."""

    step: int = 0
    tokens: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    val_loss: float | None = None
    world_size: int = 1
    scheduler: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one run directory.

    Args:
        attempt: the number of this start; an older start never overwrites a newer one's work.
        keep: how many of the newest are kept.
    """

    def __init__(self, run_dir: Path, world: World, attempt: int, keep: int) -> None:
        self._folder = run_dir / FOLDER
        self._world = world
        self._attempt = attempt
        self._keep = keep

    def steps(self) -> list[int]:
        """The steps of the committed checkpoints, ascending."""
        names = (path.name for path in self._folder.glob("step_*"))
        return sorted(int(m[1]) for name in names if (m := re.fullmatch(r"step_(\d+)", name)))

    def save(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: TrainerState
    ) -> None:
        """Write the checkpoint of `state.step`; all ranks call this together.

        Raises:
            TrainerError: the disk is too full, or a newer start of the run has taken over.
            OSError: the disk refused; earlier checkpoints are untouched.
        """
        world = self._world
        temporary = self._folder / f".tmp_step_{state.step}.{self._attempt}"
        world.on_main(lambda: self._prepare(temporary))
        try:
            with _plain_errors():
                dcp.save(
                    {**_tensors(model, optimizer), "random": {str(world.rank): _random_state()}},
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
            fault = next(filter(None, world.gather(self._fault(folder))), None)
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
        for step in self.steps()[: -self._keep]:
            shutil.rmtree(self._folder / f"step_{step}", ignore_errors=True)

    def _check_lease(self) -> None:
        """A lost node may come back and write; only the newest start may commit."""
        newest = (read_json(self._folder.parent / "progress.json") or {}).get("attempt", 0)
        if newest > self._attempt:
            raise TrainerError(
                f"this is start {self._attempt} of the run and start {newest} has taken over; "
                "its checkpoints stand, this one is not written"
            )

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
            f"{folder}: made with {key}={state.run.get(key)!r}, the config says {value!r}; "
            "start a new run, or restore the old value"
            for key, value in run.items()
            if state.run.get(key) != value
        ]
        if differences:
            raise ConfigError(*differences)
        tensors = _tensors(model, optimizer)
        # On another number of ranks each goes on from its own fresh random state.
        random = {str(world.rank): _random_state()} if state.world_size == world.size else {}
        with _plain_errors():
            dcp.load(
                {**tensors, "random": random},
                storage_reader=dcp.FileSystemReader(folder),
                process_group=world.cpu_group,
            )
        set_model_state_dict(
            model,
            tensors["model"],
            options=StateDictOptions(ignore_frozen_params=True, strict=False),
        )
        set_optimizer_state_dict(model, optimizer, tensors["optimizer"], options=TRAINABLE_ONLY)
        for own in random.values():
            _set_random_state(own)
        return state


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
