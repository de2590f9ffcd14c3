"""A mixture of sources that is tokenised and packed while it is trained, and kept nowhere.

Row i of every global batch comes from a logical stream of its own, number i, which has its own part
of every source's files. Ranks share the streams out, so that the order of the data depends on the
size of the global batch, and not on how many ranks there are. A stream's place is a few numbers for
each source; a checkpoint holds them for every stream.
"""

import hashlib
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from runspec import files
from trainer.config import TrainConfig, instantiate
from trainer.data import batches, prepared, shards, tokenizers
from trainer.data.batches import BatchSpec, Collator, Data, Row, TrainingBatches
from trainer.data.logical import Mixture, RowStream, TextSource, encoded
from trainer.data.tokenised import tokenizer_files
from trainer.errors import ConfigError
from trainer.layers.batch import MicroBatch
from trainer.parallel.world import World

# Documents that a preview shows of each source.
SHOWN = 250
SOURCE_KEYS = {"data_files", "data_dir", "column", "weight", "name"}


class Stream:
    """The sources of a mixture; as a sequence, their first documents.

    The sequence is what a check shows: samples of `tokens` and `labels`, as torchtune's datasets.

    Args:
        tokenizer: with encode.
        sources: of each data_files (a path, a pattern, a folder, or a list), or data_dir, the
            folder of a split that cookbook prepare made; and as wanted column (text), weight (1),
            its share of the tokens, and name.
        packed: rows are always packed.

    Raises:
        ConfigError: a file is missing or not Parquet, or a source is described wrongly.
    """

    is_text = True

    def __init__(
        self, tokenizer: Any, *, sources: list[dict[str, Any]], packed: bool = True
    ) -> None:
        opened: list[TextSource] = []
        faults: list[str] = []
        for number, block in enumerate(sources if isinstance(sources, list) else []):
            try:
                opened.append(_source(f"dataset.sources.{number}", block))
            except ConfigError as error:
                faults += error.faults
        if not (opened or faults):
            faults.append("dataset.sources: must list at least one source with data_files")
        names = [source.name for source in opened]
        faults += [
            f"dataset.sources: two are called {name}: give each a name"
            for name in sorted({n for n in names if names.count(n) > 1})
        ]
        if faults:
            raise ConfigError(*faults)
        self.sources, self._tokenizer = opened, tokenizer

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = encoded(self._tokenizer, self._texts[index])
        return {"tokens": tokens, "labels": list(tokens)}

    @cached_property
    def _texts(self) -> list[str]:
        texts = []
        for source in self.sources:
            for part in shards.parts_of(source.files[:1], 1)[:1]:
                texts += next(shards.blocks(part, source.column), [])[:SHOWN]
        return texts


# Recipes name it so.
stream_dataset = Stream


def _source(key: str, block: Any) -> TextSource:
    if not isinstance(block, dict) or not (block.get("data_files") or block.get("data_dir")):
        raise ConfigError(f"{key}: needs data_files, or data_dir of a prepared split")
    if unknown := sorted(block.keys() - SOURCE_KEYS):
        raise ConfigError(f"{key}.{unknown[0]}: is not known: {', '.join(sorted(SOURCE_KEYS))}")
    weight = block.get("weight", 1.0)
    if type(weight) not in (int, float) or weight <= 0:
        raise ConfigError(f"{key}.weight: must be a number above 0, got {weight!r}")
    given, column = block.get("data_files"), str(block.get("column") or "text")
    if given is None:
        read = prepared.by_files({"data_dir": block["data_dir"]})
        if "column" not in read:
            raise ConfigError(f"{key}: {block['data_dir']} has no plain text: use entry: sft")
        given, column = read["data_files"], read["column"]
    paths = shards.files_of(f"{key}.data_files", given)
    name = block.get("name") or block.get("data_dir") or block.get("data_files")
    return TextSource(str(name), paths, column, float(weight))


class _Own(IterableDataset):
    """One worker's streams of this rank: by step, (stream, row, state after it) of each.

    A fault is an item too: raised in a worker it would lose its kind.
    """

    def __init__(self, mixture: Mixture, states: dict[int, dict[str, Any]]) -> None:
        self._mixture, self._states = mixture, states

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        numbers = list(self._states)[worker::workers]
        streams = {n: RowStream(self._mixture, n, self._states[n]) for n in numbers}
        while True:
            try:
                yield [(n, stream.row(), stream.state) for n, stream in streams.items()]
            except ConfigError as error:
                yield error
                return


class StreamBatches(TrainingBatches):
    """Global batches of a stream, which is one epoch.

    Args:
        sha256: of what the order of the data depends on.
    """

    def __init__(
        self,
        mixture: Mixture,
        world: World,
        spec: BatchSpec,
        collator: Collator,
        sha256: str,
    ) -> None:
        self.mixture, self._world, self._collator = mixture, world, collator
        self._batch_size, self._sha256 = spec.batch_size, sha256
        self.samples_per_step = mixture.streams
        self.total_steps = self.steps_per_epoch = int(spec.max_steps or 0)
        self.own = [
            (micro * world.layout.data_parallel + world.data_rank) * spec.batch_size + index
            for micro in range(spec.micro_steps)
            for index in range(spec.batch_size)
        ]
        self._workers = min(spec.workers, len(self.own))
        # This rank's streams, by the number of steps that they have given rows for.
        self._states = {0: {stream: mixture.start(stream) for stream in self.own}}

    def state(self, step: int) -> dict[str, Any]:
        """The state of every stream after `step` steps."""
        gathered = self._world.gather(self._states[step])
        return {str(n): state for own in gathered for n, state in own.items()}

    def restore(self, step: int, state: dict[str, Any] | None) -> None:
        if state is None:
            raise ConfigError(
                f"checkpoints/step_{step} does not say where the stream was: it is of a run "
                "without one; submit a new run"
            )
        self._states = {step: {stream: state[str(stream)] for stream in self.own}}

    def from_step(self, step: int) -> Iterator[list[MicroBatch]]:
        loader = DataLoader(
            _Own(self.mixture, self._states[step]),
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=self._workers,
            worker_init_fn=batches.ignore_sigterm,
            generator=torch.Generator(),
        )
        items, pinned = iter(loader), self._world.device.type == "cuda"
        size = self._batch_size
        for done in range(step + 1, self.total_steps + 1):
            rows: dict[int, Row] = {}
            states: dict[int, dict[str, Any]] = {}
            for _ in range(max(1, self._workers)):
                item = next(items)
                if isinstance(item, ConfigError):
                    # The traceback would keep the workers, which Python waits for at its end.
                    del items, loader
                    raise item
                for stream, row, state in item:
                    rows[stream], states[stream] = row, state
            # A stop is seen after the next step's rows are there: that of the last step stays.
            self._states = {done - 1: self._states[done - 1], done: states}
            micro_batches = [
                self._collator.collate([rows[stream] for stream in self.own[begin : begin + size]])
                for begin in range(0, len(self.own), size)
            ]
            yield [batch.pin_memory() for batch in micro_batches] if pinned else micro_batches

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "dataset_sha256": self._sha256,
            "packed_row_length": self._collator.length,
            "samples_per_step": self.samples_per_step,
        }

    @property
    def described(self) -> str:
        sources = self.mixture.sources
        total = sum(source.weight for source in sources)
        size = sum(path.stat().st_size for source in sources for path in source.files)
        shares = ", ".join(f"{100 * s.weight / total:.0f} % {s.name}" for s in sources)
        return (
            f"a stream of {size / 2**30:,.1f} GiB in packed rows of {self._collator.length:,} "
            f"tokens: {shares}"
        )

    def faults(self, key: str, vocab_size: int, max_seq_len: int) -> list[str]:
        """A token that the model does not know is found when it is read."""
        texts = []
        if self._collator.length is not None and self._collator.length > max_seq_len:
            texts.append(
                f"{key}: rows of {self._collator.length} tokens, the model takes {max_seq_len}; "
                f"set tokenizer.max_seq_len={max_seq_len}"
            )
        return texts


def _unchanged(item: Any) -> Any:
    """Arrays stay arrays: as tensors each would take a file of shared memory."""
    return item


def build(config: TrainConfig, world: World) -> Data:
    """The batches of a stream, and those of dataset_val, which is tokenised as a whole.

    Raises:
        ConfigError: tokenizer or files cannot be read.
    """
    tokenizer = world.on_all(lambda: tokenizers.of_block(config.tokenizer))
    mismatches = world.on_all(lambda: tokenizers.faults(tokenizer, config.model_folder))
    spec = BatchSpec.of(config, world)
    streams = spec.batch_size * spec.micro_steps * world.layout.data_parallel

    # Rank 0 alone looks at all files.
    def find() -> tuple[list[TextSource], list[list[shards.Part]], str]:
        sources = instantiate("dataset", config.dataset, tokenizer).sources
        parts = [shards.parts_of(source.files, streams) for source in sources]
        for source, own in zip(sources, parts, strict=True):
            if not own:
                raise ConfigError(f"dataset.sources: {source.name} has no text")
        content = [config.tokenizer, *(source.identity for source in sources)]
        content += [files.sha256(path) for path in tokenizer_files(config.tokenizer)]
        return sources, parts, hashlib.sha256(repr(content).encode()).hexdigest()[:16]

    sources, parts, sha256 = world.from_main(find)
    length = int(config.tokenizer["max_seq_len"])
    known = tokenizers.token_rows(tokenizer, config.model_folder)
    mixture = Mixture(sources, parts, tokenizer, length, spec.seed, streams, known)
    collator = Collator(getattr(tokenizer, "pad_id", 0), config.row_multiple, length)
    training = StreamBatches(mixture, world, spec, collator, sha256)
    return Data(training, batches.validation(config, world, tokenizer), mismatches)
