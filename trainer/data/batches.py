"""The order of the training data and the batches that a rank sees; a pure function of the step."""

import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from trainer.config import ALL_SHARED, TrainConfig
from trainer.data import packing, tokenizers
from trainer.data.form import SINGLE, SampleForm
from trainer.data.source import Source
from trainer.data.tokenised import TokenisedDataset, open_dataset
from trainer.errors import ConfigError
from trainer.layers.batch import IGNORE_INDEX, MicroBatch
from trainer.model import Documents, Inputs
from trainer.parallel.world import World

# Enough that reading, which is quick, never makes a GPU wait.
WORKERS_ON_GPU = 2
NONE = np.zeros(0, np.int64)


class Row(NamedTuple):
    """Samples of one packed row, or one sample."""

    # Its documents as (tokens, trained).
    documents: list[tuple[np.ndarray, np.ndarray]]
    # Whether they count.
    counted: bool
    # Their indices.
    samples: np.ndarray


class Collator:
    """Makes batches of rows.

    Args:
        pad_id: the token of padding.
        multiple: what the length of every row must be divisible by.
        row_length: tokens of a packed row; None packs nothing.
        documents_per_sample: documents that lie together.

    length: of a packed row with its padding; None if rows are not packed.
    """

    def __init__(
        self,
        pad_id: int,
        multiple: int = 1,
        row_length: int | None = None,
        documents_per_sample: int = 1,
    ) -> None:
        self._pad_id, self._multiple = pad_id, multiple
        self.length = None if row_length is None else row_length + -row_length % multiple
        self.documents_per_sample = documents_per_sample

    def collate(self, rows: list[Row]) -> MicroBatch:
        """A batch of rows. The last token of a document never predicts the next one's first."""
        packed = self.length is not None
        samples = np.concatenate([row.samples for row in rows if row.counted] or [NONE])
        if not packed:
            rows = [Row([own], row.counted, NONE) for row in rows for own in row.documents]
        longest = self.length or max(len(tokens) for row in rows for tokens, _ in row.documents)
        shape = len(rows), longest + -longest % self._multiple
        tokens = np.full(shape, self._pad_id, dtype=np.int64)
        labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        positions, numbers = np.zeros(shape, np.int64), np.zeros(shape, np.int32)
        begins, firsts, ends, documents_so_far = [], [], [NONE], 0
        for line, row in enumerate(rows):
            lengths = [len(own) for own, _ in row.documents]
            end = sum(lengths)
            firsts.append(documents_so_far)
            documents_so_far += len(lengths) * row.counted
            tokens[line, :end] = np.concatenate([own for own, _ in row.documents])
            if row.counted:
                trained = np.concatenate([trained for _, trained in row.documents])
                labels[line, : end - 1] = np.where(trained[1:], tokens[line, 1:end], IGNORE_INDEX)
                labels[line, np.cumsum(lengths) - 1] = IGNORE_INDEX
                ends.append(np.cumsum(lengths) - 1 + line * shape[1])
            if end < shape[1]:
                # The padding is a document too: every position belongs to one.
                lengths.append(shape[1] - end)
            first = np.cumsum([0, *lengths[:-1]])
            positions[line] = np.arange(shape[1]) - np.repeat(first, lengths)
            numbers[line] = np.repeat(np.arange(len(lengths)), lengths)
            begins.append(first + line * shape[1])
        offsets = np.concatenate([*begins, [len(rows) * shape[1]]]).astype(np.int32)
        documents = Documents(torch.from_numpy(numbers), torch.from_numpy(offsets))
        inputs = Inputs(torch.from_numpy(tokens))
        if packed:
            inputs = Inputs(inputs.tokens, documents, torch.from_numpy(positions))
        trained_at = np.flatnonzero(labels != IGNORE_INDEX)
        counted = [len(own) for row in rows if row.counted for own, _ in row.documents]
        return MicroBatch(
            inputs=inputs,
            labels=torch.from_numpy(labels),
            trained=torch.from_numpy(trained_at),
            document_index=torch.from_numpy(
                numbers.ravel()[trained_at] + np.asarray(firsts)[trained_at // shape[1]]
            ),
            documents_per_sample=self.documents_per_sample,
            samples=torch.from_numpy(samples),
            numbers=torch.zeros(len(samples)),
            token_count=sum(counted),
            target_count=len(trained_at),
            lengths=tuple(counted),
            ends=torch.from_numpy(np.concatenate(ends)),
        )


class Rows(Collator, Dataset):
    """The rows of batches: one document per row, or whole samples packed to one length.

    By index the samples of a packed row, else a sample, whose documents are a row each; ~i is i
    with every label masked.

    Args:
        row_length: tokens of a packed row; None packs nothing.
        multiple: what the length of every row must be divisible by.
        seed: of the packing; None packs the samples in order.
    """

    def __init__(
        self,
        samples: TokenisedDataset,
        pad_id: int,
        multiple: int = 1,
        row_length: int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(pad_id, multiple, row_length, samples.documents.shape[1])
        self.samples, self._begins = samples, np.arange(len(samples) + 1)
        self._order = np.arange(len(samples))
        if row_length is not None:
            rows = packing.pack(samples.lengths, row_length, seed)
            self._begins = np.cumsum([0, *map(len, rows)])
            self._order = np.concatenate([np.asarray(row) for row in rows])

    def __len__(self) -> int:
        return len(self._begins) - 1

    def __getitem__(self, index: int) -> Row:
        row = index if index >= 0 else ~index
        members = self._order[self._begins[row] : self._begins[row + 1]]
        documents = [document for member in members for document in self._documents(int(member))]
        return Row(documents, index >= 0, members)

    def collate(self, rows: list[Row]) -> MicroBatch:
        """As Collator.collate, with what belongs to the samples."""
        batch = super().collate(rows)
        numbers = self.samples.numbers[batch.samples.numpy()]
        batch.numbers = torch.from_numpy(numbers.astype(np.float32))
        return batch

    def _documents(self, index: int) -> list[tuple[np.ndarray, np.ndarray]]:
        tokens, trained = self.samples[index]
        if self.documents_per_sample == 1:
            return [(tokens, trained)]
        ends = np.cumsum(self.samples.documents[index])[:-1]
        return list(zip(np.split(tokens, ends), np.split(trained, ends), strict=True))

    @property
    def filled(self) -> float:
        """Share of the packed rows' positions that hold a token."""
        return float(self.samples.lengths.sum()) / (len(self) * (self.length or 1))


@dataclass(frozen=True)
class BatchSpec:
    """How rows become the batches of steps."""

    # Rows of a rank's micro-batch.
    batch_size: int
    # Micro-batches of a step.
    micro_steps: int = 1
    # Of the order; None keeps the rows' own.
    seed: int | None = None
    epochs: int = 1
    max_steps_per_epoch: int | None = None
    max_steps: int | None = None
    # Processes that read ahead; 0 reads when a batch is asked for.
    workers: int = 0
    # An epoch ends with its last full global batch, if it has any.
    drops_rest: bool = False

    @classmethod
    def of(cls, config: TrainConfig, world: World) -> "BatchSpec":
        """That of training by `config`."""
        workers = WORKERS_ON_GPU if world.device.type == "cuda" else 0
        return cls(
            config.batch_size,
            config.gradient_accumulation_steps,
            config.seed if config.shuffle else None,
            config.epochs,
            config.max_steps_per_epoch,
            config.max_steps,
            workers if config.num_workers is None else config.num_workers,
            config.samples_answers,
        )


class TrainingBatches(ABC):
    """The batches of a run.

    steps_per_epoch, total_steps: optimizer steps. samples_per_step: over all ranks.
    """

    samples_per_step: int
    steps_per_epoch: int
    total_steps: int

    def epoch_of(self, step: int) -> int:
        """Epoch (from 0) to which the step with this index (from 0) belongs."""
        return step // self.steps_per_epoch

    @abstractmethod
    def from_step(self, step: int) -> Iterator[list[MicroBatch]]:
        """This rank's micro-batches, one list per step, from step index `step` to the last."""

    def state(self, step: int) -> Any:
        """What a checkpoint of `step` must hold beside the step; all ranks call this together."""
        return None

    def restore(self, step: int, state: Any) -> None:  # noqa: B027, most need no more than a step
        """Go on from what `state` returned, whatever the layout was."""

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What must stay the same between a checkpoint and the start that resumes it."""

    @property
    @abstractmethod
    def described(self) -> str:
        """What it is, in words."""

    @abstractmethod
    def faults(self, key: str, vocab_size: int, max_seq_len: int) -> list[str]:
        """The faults that samples would cause in a model with this vocabulary and context.

        Args:
            key: the config's, for messages.
        """


class Batches(TrainingBatches):
    """Global batches in a fixed order, split over the ranks that see different data.

    Each epoch is a permutation by (seed, epoch). Nothing is dropped, unless `drops_rest`: the last
    global batch of an epoch may have fewer rows, and is filled up by masked ones, which add nothing
    to the loss. As one step takes one global batch, the step is the data position.
    """

    def __init__(self, rows: Rows, world: World, spec: BatchSpec) -> None:
        self.rows, self.size = rows, len(rows)
        self._world, self._spec = world, spec
        self.samples_per_step = spec.batch_size * spec.micro_steps * world.layout.data_parallel
        full, rest = divmod(self.size, self.samples_per_step)
        steps = full if spec.drops_rest and full else full + (rest > 0)
        self.steps_per_epoch = min(steps, spec.max_steps_per_epoch or steps)
        steps = self.steps_per_epoch * spec.epochs
        self.total_steps = min(steps, spec.max_steps or steps)

    def from_step(self, step: int) -> Iterator[list[MicroBatch]]:
        loader = DataLoader(
            self.rows,
            batch_sampler=self._index_lists(step),
            collate_fn=self.rows.collate,
            num_workers=self._spec.workers,
            worker_init_fn=ignore_sigterm,
            pin_memory=self._world.device.type == "cuda",
            # Its own generator, so that the loader leaves the ranks' random state alone.
            generator=torch.Generator(),
        )
        micro_batches = iter(loader)
        for _ in range(step, self.total_steps):
            yield [next(micro_batches) for _ in range(self._spec.micro_steps)]

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "dataset_size": self.size,
            "dataset_sha256": self.rows.samples.sha256,
            "packed_row_length": self.rows.length,
            "samples_per_step": self.samples_per_step,
            "steps_per_epoch": self.steps_per_epoch,
        }

    @property
    def described(self) -> str:
        rows = self.rows
        samples, each = rows.samples.documents.shape
        count = f"{samples:,} samples" + (f" of {each} documents" if each > 1 else "")
        if rows.length is None:
            return count
        return (
            f"{count} in {len(rows):,} packed rows of {rows.length:,} tokens, "
            f"{100 * rows.filled:.0f} % filled"
        )

    def faults(self, key: str, vocab_size: int, max_seq_len: int) -> list[str]:
        samples, row_length = self.rows.samples, self.rows.length
        texts: list[str] = []
        lengths = samples.documents.max(1)
        longest = int(lengths.argmax())
        if row_length is not None and row_length > max_seq_len:
            texts.append(
                f"{key}.packed: rows of {row_length} tokens, the model takes {max_seq_len}; "
                f"set tokenizer.max_seq_len={max_seq_len}"
            )
        elif lengths[longest] > max_seq_len:
            texts.append(
                f"{key}: {int((lengths > max_seq_len).sum()):,} of {len(samples):,} samples "
                f"are too long: {samples.origin(longest)} has {lengths[longest]} tokens, "
                f"the model takes {max_seq_len}; set tokenizer.max_seq_len={max_seq_len}"
            )
        highest = int(samples.highest.argmax())
        if samples.highest[highest] >= vocab_size:
            texts.append(
                f"tokenizer: it made token {samples.highest[highest]} of {key}'s "
                f"{samples.origin(highest)}, the model knows {vocab_size} tokens; "
                "leave it out, or give the model's own tokenizer"
            )
        return texts

    def _index_lists(self, first_step: int) -> Iterator[list[int]]:
        epoch, world, size = -1, self._world, self._spec.batch_size
        for step in range(first_step, self.total_steps):
            if self.epoch_of(step) != epoch:
                epoch = self.epoch_of(step)
                order = self._order(epoch)
            begin = (step % self.steps_per_epoch) * self.samples_per_step
            for micro in range(self._spec.micro_steps):
                offset = begin + (micro * world.layout.data_parallel + world.data_rank) * size
                own = order[offset : offset + size]
                # Masked rows fill it up: every batch has one shape, for which layers are compiled
                # once, and a rank without any row still runs the passes that the others run.
                yield own + [~(own or order)[0]] * (size - len(own))

    def _order(self, epoch: int) -> list[int]:
        if self._spec.seed is None:
            return list(range(self.size))
        generator = torch.Generator().manual_seed(self._spec.seed * 1_000_003 + epoch)
        return torch.randperm(self.size, generator=generator).tolist()


def ignore_sigterm(worker: int) -> None:
    """A stop reaches the ranks; the workers go on until their rank is done with them."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@dataclass(frozen=True)
class Data:
    """The batches of a run."""

    training: TrainingBatches
    # One pass over dataset_val; None without it.
    validation: Batches | None
    # Why the tokenizer does not belong to the model.
    mismatches: list[str]

    def faults(self, vocab_size: int, max_seq_len: int) -> list[str]:
        """The faults that samples would cause in a model with this vocabulary and context."""
        texts = self.mismatches + self.training.faults("dataset", vocab_size, max_seq_len)
        if self.validation is not None:
            texts += self.validation.faults("dataset_val", vocab_size, max_seq_len)
        return texts


def build(config: TrainConfig, world: World, form: SampleForm = SINGLE) -> Data:
    """Tokenise the datasets that `config` names, or find them tokenised, and lay out the batches.

    Args:
        form: what the method reads of a sample.

    Raises:
        ConfigError: tokenizer or dataset cannot be opened, a sample cannot be tokenised, a
            dataset is empty or has nothing to train on, or the two of them overlap.
    """
    tokenizer = world.on_all(lambda: tokenizers.of_block(config.tokenizer))
    mismatches = world.on_all(lambda: tokenizers.faults(tokenizer, config.model_folder))
    spec = BatchSpec.of(config, world)
    rows = _opened(Source("dataset", config.dataset, tokenizer, form), config, world, spec.seed)
    training = Batches(rows, world, spec)
    own = validation(config, world, tokenizer, form)
    if own is not None:
        _compare(world, rows.samples, own.rows.samples)
    return Data(training, own, mismatches)


def _compare(world: World, training: TokenisedDataset, validation: TokenisedDataset) -> None:
    """A validation loss over samples that are trained on says nothing."""
    equal = int(np.isin(validation.fingerprints, training.fingerprints).sum())
    if equal == len(validation):
        raise ConfigError(ALL_SHARED)
    if equal:
        world.say(
            f"note: dataset_val: {equal:,} of {len(validation):,} samples are the same as "
            "samples of dataset"
        )


def validation(
    config: TrainConfig, world: World, tokenizer: Any, form: SampleForm = SINGLE
) -> Batches | None:
    """One pass over dataset_val; None without it. Raises ConfigError as `build`."""
    if config.dataset_val is None:
        return None
    source = Source("dataset_val", config.dataset_val, tokenizer, form)
    rows = _opened(source, config, world, None)
    return Batches(rows, world, BatchSpec(config.batch_size_val or config.batch_size))


def _opened(source: Source, config: TrainConfig, world: World, packing_seed: int | None) -> Rows:
    """The rows of a dataset as its block asks for: packed, or a sample each."""
    samples = open_dataset(source, config, world)
    empty = int((samples.targets == 0).sum())
    if empty == len(samples):
        raise ConfigError(
            f"{source.key}: no sample has a token to train on; "
            "check the answers' column and tokenizer.max_seq_len"
        )
    if empty:
        world.say(
            f"note: {source.key}: {empty:,} of {len(samples):,} samples hold no token to train on "
            "(no answer, or it begins after tokenizer.max_seq_len)"
        )
    max_seq_len = config.tokenizer.get("max_seq_len")
    for note in samples.notes(max_seq_len):
        world.say(f"note: {source.key}: {note}")
    row_length = max_seq_len if source.given.get("packed") else None
    pad_id = getattr(source.tokenizer, "pad_id", 0)
    return Rows(samples, pad_id, config.row_multiple, row_length, packing_seed)
