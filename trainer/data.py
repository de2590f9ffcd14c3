"""The order of the training data and the batches that a rank sees; a pure function of the step."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from trainer.compat import padded_collate_sft
from trainer.config import TrainConfig, instantiate
from trainer.distributed import World
from trainer.errors import ConfigError

IGNORE_INDEX = -100


@dataclass
class MicroBatch:
    """What one rank runs in one forward pass.

    tokens, labels: int64 [batch, sequence], padded to the longest sample, and on to a length that
    the tensor-parallel ranks divide; labels are already shifted (labels[b, s] is the target of
    position s) and hold `IGNORE_INDEX` where nothing is trained. token_count: real input tokens.
    target_count: labels that are trained. attention_pairs: query-key pairs of real tokens, n(n+1)/2
    for a document of n.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    token_count: int
    target_count: int
    attention_pairs: int

    def pin_memory(self) -> "MicroBatch":
        """The same batch where a GPU can fetch it without waiting; the loader calls this."""
        return replace(self, tokens=self.tokens.pin_memory(), labels=self.labels.pin_memory())


class _Samples(Dataset):
    """A dataset in which index ~i is sample i with every label masked."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= 0:
            return self._read(index)
        return {"tokens": self._read(~index)["tokens"], "labels": None}

    def _read(self, index: int) -> dict[str, Any]:
        try:
            return self._samples[index]
        except KeyError as error:
            raise ConfigError(f"dataset: sample {index}: there is no column {error}") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"dataset: sample {index}: {error}") from error


class Batches:
    """Global batches in a fixed order, split over the ranks that see different data.

    Each epoch is a permutation by (seed, epoch). Nothing is dropped: the last global batch of an
    epoch may be smaller, and a rank that has no sample left in it runs a masked one, which adds
    nothing to the loss. As one step takes one global batch, the step is the data position.
    """

    def __init__(self, config: TrainConfig, world: World, tokenizer: Any, samples: Any) -> None:
        if len(samples) == 0:
            raise ConfigError("dataset: holds no sample")
        self.size = len(samples)
        self.samples_per_step = (
            config.batch_size * config.gradient_accumulation_steps * world.data_size
        )
        self.steps_per_epoch = -(-self.size // self.samples_per_step)
        if config.max_steps_per_epoch:
            self.steps_per_epoch = min(self.steps_per_epoch, config.max_steps_per_epoch)
        self.total_steps = self.steps_per_epoch * config.epochs
        if config.max_steps:
            self.total_steps = min(self.total_steps, config.max_steps)
        self._samples = _Samples(samples)
        self._seed, self._shuffle = config.seed, config.shuffle
        self._batch_size = config.batch_size
        self._micro_steps = config.gradient_accumulation_steps
        self._world, self._multiple = world, world.tensor_parallel_dim
        self._pad_id = getattr(tokenizer, "pad_id", 0)

    def epoch_of(self, step: int) -> int:
        """Epoch (from 0) to which the step with this index (from 0) belongs."""
        return step // self.steps_per_epoch

    def from_step(self, step: int) -> Iterator[list[MicroBatch]]:
        """This rank's micro-batches, one list a step, from step index `step` to the last."""
        loader = DataLoader(
            self._samples,
            batch_sampler=self._index_lists(step),
            collate_fn=self._collate,
            pin_memory=self._world.device.type == "cuda",
            # Its own generator, so that the loader leaves the ranks' random state alone.
            generator=torch.Generator(),
        )
        micro_batches = iter(loader)
        for _ in range(step, self.total_steps):
            yield [next(micro_batches) for _ in range(self._micro_steps)]

    def _index_lists(self, first_step: int) -> Iterator[list[int]]:
        epoch, world = -1, self._world
        for step in range(first_step, self.total_steps):
            if self.epoch_of(step) != epoch:
                epoch = self.epoch_of(step)
                order = self._order(epoch)
            begin = (step % self.steps_per_epoch) * self.samples_per_step
            for micro in range(self._micro_steps):
                offset = begin + (micro * world.data_size + world.data_rank) * self._batch_size
                yield order[offset : offset + self._batch_size] or [~order[0]]

    def _order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self.size))
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        return torch.randperm(self.size, generator=generator).tolist()

    def _collate(self, samples: list[dict[str, Any]]) -> MicroBatch:
        counted = [s for s in samples if s["labels"] is not None]
        rows = [
            {
                "tokens": [int(t) for t in s["tokens"]],
                "labels": [IGNORE_INDEX] * len(s["tokens"])
                if s["labels"] is None
                else [int(t) for t in s["labels"]],
            }
            for s in samples
        ]
        batch = padded_collate_sft(rows, padding_idx=self._pad_id, ignore_idx=IGNORE_INDEX)
        tokens = batch["tokens"]
        # Attention is causal: what is added behind a sample reaches none of its tokens.
        tokens = F.pad(tokens, (0, -tokens.shape[1] % self._multiple), value=self._pad_id)
        labels = torch.full_like(tokens, IGNORE_INDEX)
        labels[:, : batch["labels"].shape[1] - 1] = batch["labels"][:, 1:]
        return MicroBatch(
            tokens=tokens,
            labels=labels,
            token_count=sum(len(s["tokens"]) for s in counted),
            target_count=int((labels != IGNORE_INDEX).sum()),
            attention_pairs=sum(n * (n + 1) // 2 for n in (len(s["tokens"]) for s in counted)),
        )


def build(config: TrainConfig, world: World) -> tuple[Batches, Any]:
    """The batches and the tokenizer that `config` names.

    Raises:
        ConfigError: tokenizer or dataset cannot be opened, or the dataset is empty.
    """
    tokenizer = world.agree(lambda: instantiate("tokenizer", config.tokenizer))
    # Rank 0 first, so that one process alone converts the files and fills the cache.
    first = world.on_main(lambda: _open_dataset(config, tokenizer))
    samples = world.agree(lambda: _open_dataset(config, tokenizer) if first is None else first)
    return world.agree(lambda: Batches(config, world, tokenizer, samples)), tokenizer


def _open_dataset(config: TrainConfig, tokenizer: Any) -> Any:
    from datasets import disable_progress_bars
    from datasets.exceptions import DatasetGenerationError

    disable_progress_bars()
    try:
        return instantiate("dataset", config.dataset, tokenizer)
    except StopIteration:
        raise ConfigError("dataset: holds no sample") from None
    except DatasetGenerationError as error:
        reason = error.__cause__ or error
        raise ConfigError(f"dataset: cannot be read: {str(reason).splitlines()[0]}") from None
    except (OSError, ConnectionError) as error:
        raise ConfigError(f"dataset: cannot be opened: {str(error).splitlines()[0]}") from None


def check_batch(batch: MicroBatch, vocab_size: int, max_seq_len: int) -> None:
    """Raise ConfigError for what would fail obscurely inside the model.

    Args:
        vocab_size: tokens that the model's embedding knows.
        max_seq_len: positions that the model knows.
    """
    longest = batch.tokens.shape[1]
    if longest > max_seq_len:
        raise ConfigError(
            f"dataset: a sample has {longest} tokens, the model takes {max_seq_len}; "
            f"set tokenizer.max_seq_len={max_seq_len}"
        )
    highest = int(batch.tokens.max())
    if highest >= vocab_size:
        raise ConfigError(
            f"tokenizer: it made token {highest}, the model knows {vocab_size} tokens; "
            "tokenizer and model do not belong together"
        )
