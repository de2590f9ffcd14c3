"""The checkpoints of a run on the disk: complete or absent, verified before they are read.

A checkpoint is written as `.tmp_step_<n>.<attempt>`: one shard per rank, trainer_state.json, a
manifest with the SHA-256 of every file, then the marker COMPLETE. All is flushed to the disk
before the folder is renamed to `step_<n>`.

Only what is missing, or has another size or hash, is damaged. Storage that cannot be read is waited
for, and then ends the attempt.
"""

import hashlib
import json
import math
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from runspec import files, publish
from runspec.storage import ABSENT, patiently, wait_s
from trainer.checkpoint.lease import Lease
from trainer.errors import ConfigError, StorageError, TrainerError

T = TypeVar("T")

# What an entry of the identity that is no key of a config depends on.
HINTS = {
    "samples_per_step": "batch_size x gradient_accumulation_steps x ranks with their own data",
    "steps_per_epoch": "max_steps_per_epoch, or the number of samples or packed rows",
    "dataset_size": "the number of samples or packed rows",
    "dataset_sha256": "the samples, or the tokenizer",
    "packed_row_length": "dataset.packed and tokenizer.max_seq_len",
    "base_weights": "checkpointer.checkpoint_dir contains other weights than the adapter's base",
    "method": "model._component_ and model.quantize_base",
}


@dataclass
class TrainerState:
    """What a resume needs beside tensors."""

    step: int = 0
    # Of the run so far.
    tokens: int = 0
    # The learning rate of the next step.
    lr: float | None = None
    loss_first: float | None = None
    loss_last: float | None = None
    # Measured on the weights of this very step; None if it was not.
    val_loss: float | None = None
    # The lowest that a checkpoint of the run had.
    best_val_loss: float | None = None
    skipped_steps: int = 0
    world_size: int = 1
    tensor_parallel_dim: int = 1
    # The objective's identity, which must be the config's.
    run: dict[str, Any] = field(default_factory=dict)
    # The keys that may change at resume.
    settings: dict[str, Any] = field(default_factory=dict)
    # Where the data are, if the step alone does not say it.
    data: Any = None

    def check_identity(self, now: dict[str, Any]) -> None:
        """Refuse a config with which the run would not go on as the same run.

        Args:
            now: the identity of this start.

        Raises:
            ConfigError: one line per key that differs.
        """
        faults = [
            f"{name} may not change at resume: checkpoints/step_{self.step} was made with {old!r}, "
            f"the config gives {new!r}" + (f" ({HINTS[name]})" if name in HINTS else "")
            for name, old, new in _differences("", self.run, now)
        ]
        if faults:
            raise ConfigError(
                *sorted(faults),
                "restore these values and resume again, or submit a new run to train with the new "
                "ones",
            )

    def changes(self, now: dict[str, Any]) -> list[str]:
        """One line for each of the settings that differs and may: it holds from this start on."""
        return [
            f"{name} changes from {old!r} to {new!r}"
            for name, old, new in _differences("", self.settings, now)
        ]


def _differences(name: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) of each value that differs below the key `name`."""
    if isinstance(old, dict) and isinstance(new, dict):
        # A checkpoint of an older version of the trainer knows fewer keys of the first level.
        for key in dict.fromkeys([*new, *old]) if name else old.keys() & new.keys():
            yield from _differences(f"{name}.{key}".lstrip("."), old.get(key), new.get(key))
    elif old != new:
        yield name, old, new


class CommittedCheckpoints:
    """Finds, verifies, commits and removes checkpoints; knows nothing of tensors and ranks.

    Args:
        attempt: the number of this start; an older start never overwrites a newer one's work.
        keep: how many of the newest are kept, beside the best one.
    """

    def __init__(self, run_dir: Path, attempt: int, keep: int) -> None:
        self.folder = run_dir / files.CHECKPOINTS
        self.lease = Lease(run_dir, attempt)
        self._attempt, self._keep = attempt, keep

    def steps(self) -> list[int]:
        """The steps of the committed checkpoints, ascending."""
        return _read(files.checkpoint_folders, self.folder)

    def of(self, step: int) -> Path:
        """The folder of the checkpoint of `step`."""
        return self.folder / f"step_{step}"

    def best(self) -> tuple[int, float] | None:
        """(step, val_loss) of the checkpoint with the lowest val_loss; None if none has one."""
        losses = []
        for step in self.steps():
            loss = self._content(step).get("val_loss")
            if loss is not None and math.isfinite(loss):
                losses.append((loss, step))
        return min(losses)[::-1] if losses else None

    def state(self, step: int) -> TrainerState:
        """The state in a sound checkpoint; what an older version of the trainer kept is ignored."""
        known = {field.name for field in fields(TrainerState)}
        content = self._content(step).items()
        return TrainerState(**{key: value for key, value in content if key in known})

    def _content(self, step: int) -> dict[str, Any]:
        """The content of the state's file, {} if it is missing or damaged."""
        try:
            return _read(files.read_json, self.of(step) / files.CHECKPOINT_STATE) or {}
        except (*ABSENT, ValueError):
            return {}

    def prepare(self, step: int) -> None:
        """Make the temporary folder of a checkpoint.

        Raises:
            TrainerError: the disk is too full, or a newer start of the run has taken over.
        """
        self._check_lease()
        self.folder.mkdir(parents=True, exist_ok=True)
        publish.remove_left(self.folder)
        for left in self.folder.glob(".tmp_step_*.*"):
            # A newer start may have begun since.
            number = left.name.rpartition(".")[2]
            if number.isdigit() and int(number) <= self._attempt:
                shutil.rmtree(left, ignore_errors=True)
        newest = max(self.steps(), default=None)
        if newest is not None:
            size = sum(path.stat().st_size for path in self.of(newest).iterdir())
            free = shutil.disk_usage(self.folder).free
            if free < 2 * size:
                raise TrainerError(
                    f"{self.folder}: {free >> 20} MiB free, a checkpoint takes {size >> 20} MiB "
                    "and twice that must be free; make room, then resume the run"
                )
        self.temporary(step).mkdir()

    def temporary(self, step: int) -> Path:
        """The folder that a checkpoint is written to before it is committed."""
        return self.folder / f".tmp_step_{step}.{self._attempt}"

    def commit(self, state: TrainerState, shards: dict[str, Any]) -> None:
        """Give a written checkpoint its name, then remove the oldest ones.

        Args:
            shards: `hashes` of the ranks' files.
        """
        temporary = self.temporary(state.step)
        files.write_json(temporary / files.CHECKPOINT_STATE, asdict(state))
        own = hashes(temporary, ".metadata") | hashes(temporary, files.CHECKPOINT_STATE)
        manifest = temporary / files.CHECKPOINT_MANIFEST
        files.write_json(manifest, {"step": state.step, "files": shards | own})
        files.write_text(temporary / files.CHECKPOINT_COMPLETE, files.sha256(manifest) + "\n")
        files.fsync_path(temporary)
        self._check_lease()
        # Ranks of an older start, on a node that was given up, may have come as far as this one.
        publish.finish(temporary, self.of(state.step), "replace")
        files.fsync_path(self.folder)
        best, _ = self.best() or (None, None)
        for step in self.steps()[: -self._keep]:
            if step != best:
                shutil.rmtree(self.of(step), ignore_errors=True)

    def fault(self, step: int, part: int = 0, parts: int = 1) -> str | None:
        """What is wrong with a checkpoint; None if it is sound.

        Args:
            part: which of `parts` equal shares of the files to verify.

        Raises:
            StorageError: it cannot be read, which says nothing about it.
        """
        folder = self.of(step)
        try:
            marker = _read(Path.read_bytes, folder / files.CHECKPOINT_COMPLETE)
        except ABSENT:
            return "the marker COMPLETE is missing"
        try:
            manifest = _read(Path.read_bytes, folder / files.CHECKPOINT_MANIFEST)
        except ABSENT:
            manifest = b""
        if hashlib.sha256(manifest).hexdigest().encode() != marker.strip():
            return "the manifest is missing or changed"
        content = json.loads(manifest)
        if content["step"] != step:
            return f"it is a copy of the checkpoint of step {content['step']}"
        entries = content["files"]
        for name in sorted(entries)[part::parts]:
            entry, path = entries[name], folder / name
            try:
                status = _read(Path.stat, path)
                if not stat.S_ISREG(status.st_mode) or status.st_size != entry["bytes"]:
                    return f"{name} is missing or cut short"
                if _read(files.sha256, path) != entry["sha256"]:
                    return f"{name} has changed on the disk"
            except ABSENT:
                return f"{name} is missing or cut short"
        return None

    def rename_damaged(self, damaged: dict[int, str]) -> None:
        """Rename damaged checkpoints, so that they are neither counted nor lost."""
        for step, fault in damaged.items():
            print(f"checkpoints/step_{step} is damaged and renamed: {fault}", flush=True)
            aside = self.folder / f"damaged_step_{step}"
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(self.of(step), aside)

    def _check_lease(self) -> None:
        """A lost node may come back and write; only the newest start may commit."""
        newest = _read(lambda _: self.lease.newest(), self.folder.parent)
        if newest > self._attempt:
            raise self.lease.superseded(newest)


def _read(read: Callable[[Path], T], path: Path) -> T:
    """Return read(path), tried again while the storage cannot be read.

    Raises:
        FileNotFoundError, NotADirectoryError, IsADirectoryError: the file itself is missing.
        StorageError: it could not be read in all that time.
    """
    try:
        return patiently(read, path)
    except ABSENT:
        raise
    except OSError as error:
        raise StorageError(
            f"{error.filename or path} could not be read for {wait_s():.0f} s ({error.strerror}): "
            "check its filesystem on this node; the checkpoints were left as they are"
        ) from error


def hashes(folder: Path, pattern: str) -> dict[str, dict[str, Any]]:
    """SHA-256 and size of the files in a folder, by name."""
    return {
        path.name: {"sha256": files.sha256(path), "bytes": path.stat().st_size}
        for path in sorted(folder.glob(pattern))
    }
