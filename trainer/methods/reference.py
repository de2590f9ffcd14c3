"""The reference of preference tuning: log-probabilities of whole answers before training.

They come from the policy with its adapter off, from a frozen second model, or from a file beside
the tokens that is made once, before the first step, by the policy itself: then no second model is
held and no second forward pass is made in a step.
"""

import hashlib
import io
import json
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

from runspec import files
from runspec.adapters import is_quantised
from runspec.storage import patiently
from trainer.checkpoint.weights import SafetensorsSource
from trainer.config import TrainConfig
from trainer.data.batches import Rows
from trainer.data.tokenised import TokenisedDataset
from trainer.errors import ConfigError, cache_written
from trainer.layers.adapters.base import disabled
from trainer.layers.batch import MicroBatch
from trainer.layers.log_probs import document_sums, token_log_probs
from trainer.methods.base import Models
from trainer.parallel.world import World
from trainer.sharded import reshard

# Of the file of kept values.
FORMAT, DIGEST_BYTES = 2, hashlib.sha256().digest_size
# After this many batches the results are written, so that a start that is killed loses few.
BATCHES_PER_PART = 20
PROGRESS_EVERY_S = 15.0


def sums(module: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    """The log-probability of each document's trained tokens, fp32 [samples, documents]."""
    return document_sums(token_log_probs(module, batch), batch)


def in_step(models: Models, batch: MicroBatch, config: TrainConfig) -> torch.Tensor | None:
    """The reference's sums for a batch on the device; None for a loss without a reference.

    Call it before the policy's own pass: see Models.as_reference.
    """
    kind = config.reference_kind
    if kind == "log_probs":
        return batch.reference
    if not kind:
        return None
    with models.as_reference() as module:
        return sums(module, batch)


def fingerprints(config: TrainConfig, world: World) -> dict[str, str]:
    """Hashes of the weights that the reference has, by name, the same on every rank."""

    def read() -> dict[str, str]:
        prints = {"reference": SafetensorsSource.open(config.checkpointer).fingerprint()}
        start = config.checkpointer.get("adapter_checkpoint")
        if start is not None:
            from trainer.checkpoint import adapter

            prints["reference_adapter"] = files.sha256(adapter.file_of(config))
        return prints

    return world.from_main(read)


class KeptLogProbs:
    """The file of a dataset's log-probabilities by the model before training.

    Args:
        weights: see `fingerprints`.
    """

    def __init__(self, config: TrainConfig, world: World, weights: dict[str, str]) -> None:
        self._config, self._world = config, world
        precision = (config.dtype, config.fp8_recipe, is_quantised(config.model))
        content = json.dumps([FORMAT, weights, precision], sort_keys=True, default=str)
        self._name = hashlib.sha256(content.encode()).hexdigest()[:16]

    def give(self, key: str, rows: Rows[TokenisedDataset], models: Models) -> None:
        """Let batches of `rows` have the log-probabilities; computes what is not kept yet.

        Args:
            key: of the dataset, for messages.
            models: with the weights before training, and no more than that.

        Raises:
            ConfigError: the folder of the tokens cannot be written to.
        """
        samples, world = rows.samples, self._world
        path = samples.folder / f"reference_{self._name}.npy"
        shape = samples.documents.shape
        if not world.gather(path.is_file())[0]:
            self._compute(key, rows, models, path)
        samples.reference = world.on_all(lambda: read(path, shape))

    def _compute(self, key: str, rows: Rows[TokenisedDataset], models: Models, path: Path) -> None:
        world, module = self._world, models.policy.module
        # A new adapter is no part of the model before training.
        start = self._config.checkpointer.get("adapter_checkpoint")
        base = disabled(module) if start is None else nullcontext()
        shape = rows.samples.documents.shape
        part = self._config.output_dir / f".{path.parent.name}_{path.name}"
        values = world.from_main(
            lambda: read(part, shape) if part.is_file() else np.full(shape, np.nan, np.float32)
        )
        missing = np.isnan(values[:, 0])
        left = [index for index in range(len(rows)) if missing[rows.members(index)].any()]
        world.say(f"reference: log-probabilities of {missing.sum():,} samples of {key} ...")
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        said = time.monotonic()
        module.eval()
        try:
            with torch.no_grad(), base:
                for number, batch in enumerate(self._batches(rows, left), 1):
                    own.append((batch.samples, sums(module, batch.to(world.device))))
                    if number % BATCHES_PER_PART == 0:
                        self._take(own, values)
                        world.on_main(lambda: write(part, values))
                        if time.monotonic() - said > PROGRESS_EVERY_S:
                            said = time.monotonic()
                            done = len(missing) - np.isnan(values[:, 0]).sum()
                            world.say(f"reference: {done:,} of {len(missing):,} samples of {key}")
            self._take(own, values)
        finally:
            module.train()
            reshard(module)
        world.on_main(lambda: _publish(values, path, part))

    def _batches(self, rows: Rows[TokenisedDataset], left: list[int]) -> Iterator[MicroBatch]:
        """This rank's batches of the rows that are left; every rank has as many."""
        world, size = self._world, self._config.batch_size
        for begin in range(0, len(left), size * world.data_size):
            first = begin + world.data_rank * size
            own = left[first : first + size]
            own = own + [~(own or left)[0]] * (size - len(own))
            yield rows.collate([rows[index] for index in own])

    def _take(self, own: list[tuple[torch.Tensor, torch.Tensor]], values: np.ndarray) -> None:
        """Put every rank's new results into the values of all samples."""
        here = [(s.numpy(), found.float().cpu().numpy()) for s, found in own]
        own.clear()
        for of_rank in self._world.gather(here if self._world.data_weight else []):
            for numbers, found in of_rank:
                values[numbers] = found


def _publish(values: np.ndarray, path: Path, part: Path) -> None:
    with cache_written(path.parent):
        write(path, values)
    part.unlink(missing_ok=True)


def write(path: Path, values: np.ndarray) -> None:
    """Write kept values, and behind them the SHA-256 of what is before it, atomically."""
    content = io.BytesIO()
    np.save(content, values)
    digest = hashlib.sha256(content.getbuffer()).digest()
    with files.replacing(path) as temporary:
        temporary.write_bytes(content.getvalue() + digest)


def read(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """The values that `write` wrote; ConfigError if they are not those, or of another shape."""
    content = patiently(Path.read_bytes, path)
    whole, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    if hashlib.sha256(whole).digest() == digest:
        values: np.ndarray = np.load(io.BytesIO(whole))
        if values.shape == shape:
            return values
    raise ConfigError(f"{path} is damaged: delete it and start again")
