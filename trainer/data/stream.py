"""A mixture of sources that is tokenised and packed while it is trained, and kept nowhere.

Row i of every global batch comes from a logical stream of its own, number i, which has its own part
of every source's files. Ranks share the streams out, so that the order of the data depends on the
size of the global batch, and not on how many ranks there are. A stream's place is a few numbers for
each source; a checkpoint holds them for every stream.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from runspec import files
from runspec.keys.fields import STREAM
from trainer.config import TrainConfig, instantiate
from trainer.data import batches, prepared, shards, tokenizers
from trainer.data.batches import Collator, Data, Row
from trainer.data.tokenised import tokenizer_files
from trainer.errors import ConfigError
from trainer.layers.batch import MicroBatch
from trainer.parallel.world import World

# Documents that a preview shows of each source.
SHOWN = 250
SOURCE_KEYS = {"data_files", "data_dir", "column", "weight", "name"}


@dataclass(frozen=True)
class Source:
    """Texts of one kind.

    weight: its share of the tokens, relative to the others'.
    """

    name: str
    files: list[Any]
    column: str
    weight: float

    @property
    def identity(self) -> list[Any]:
        """What its order of documents depends on; a folder may move."""
        sizes = [(path.name, path.stat().st_size) for path in self.files]
        return [self.name, self.column, self.weight, sizes]


class Stream:
    """What `stream_dataset` returns: the sources; as a sequence, their first documents.

    The sequence is what a check shows: samples of `tokens` and `labels`, as torchtune's datasets.
    """

    is_text = True

    def __init__(self, tokenizer: Any, sources: list[Source]) -> None:
        self.sources, self._tokenizer = sources, tokenizer
        self._first: list[str] | None = None

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = encoded(self._tokenizer, self._texts[index])
        return {"tokens": tokens, "labels": list(tokens)}

    @property
    def _texts(self) -> list[str]:
        if self._first is None:
            self._first = []
            for source in self.sources:
                parts = shards.parts_of(source.files[:1], 1)[:1]
                block = next(iter(shards.blocks(parts[0], source.column)), []) if parts else []
                self._first += block[:SHOWN]
        return self._first


def stream_dataset(tokenizer: Any, *, sources: list[dict[str, Any]], packed: bool = True) -> Stream:
    """The sources of a mixture.

    Args:
        tokenizer: with encode.
        sources: of each data_files (a path, a pattern, a folder, or a list), or data_dir, the
            folder of a split that cookbook prepare made; and as wanted column (text), weight (1),
            its share of the tokens, and name.
        packed: rows are always packed.

    Raises:
        ConfigError: a file is missing or of no known kind, or a source is described wrongly.
    """
    found: list[Source] = []
    faults: list[str] = []
    for number, block in enumerate(sources if isinstance(sources, list) else []):
        try:
            found.append(_source(f"dataset.sources.{number}", block))
        except ConfigError as error:
            faults += error.faults
    if not (found or faults):
        faults.append("dataset.sources: must list at least one source with data_files")
    names = [source.name for source in found]
    faults += [
        f"dataset.sources: two are called {name}: give each a name"
        for name in sorted({n for n in names if names.count(n) > 1})
    ]
    if faults:
        raise ConfigError(*faults)
    return Stream(tokenizer, found)


def _source(key: str, block: Any) -> Source:
    if not isinstance(block, dict) or not block.keys() & {"data_files", "data_dir"}:
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
            raise ConfigError(f"{key}: {block['data_dir']} holds no plain text: use entry: sft")
        given, column = read["data_files"], read["column"]
    paths = shards.files_of(f"{key}.data_files", given)
    name = block.get("name") or block.get("data_dir") or block.get("data_files")
    return Source(str(name), paths, column, float(weight))


def encoded(tokenizer: Any, text: str) -> list[int]:
    """A document's tokens, between the begin token, if the model has one, and the end token."""
    tokens: list[int] = tokenizer.encode(text, add_bos=True, add_eos=True)
    return tokens


class Cursor:
    """Where one stream is in one source.

    Args:
        parts: of the whole source.
        stream, streams: which of so many streams; it reads parts of its own.
        seed: of the order; None keeps the files' own.
        place: (pass over its parts, part, document in it), as `place` returned it.
    """

    def __init__(
        self,
        source: Source,
        parts: list[shards.Part],
        stream: int,
        streams: int,
        seed: int | None,
        place: list[int],
    ) -> None:
        self._source, self._parts, self._seed = source, parts, seed
        self._stream, self._streams = stream, streams
        self._pass, self._part, self._document = place
        self._texts: Iterator[str] | None = None
        self._text: str | None = None

    @property
    def place(self) -> list[int]:
        """Where it is; the current document is not read yet."""
        return [self._pass, self._part, self._document]

    def text(self) -> str:
        """The current document.

        Raises:
            ConfigError: a file cannot be used, or there is no document for this stream.
        """
        started = self._pass
        while self._text is None:
            if self._texts is None:
                self._texts = self._opened()
            self._text = next(self._texts, None)
            if self._text is None:
                self._texts, self._document, self._part = None, 0, self._part + 1
                if self._part >= len(self._own()):
                    self._pass, self._part = self._pass + 1, 0
                    if self._pass > started + 1:
                        raise ConfigError(
                            f"dataset.sources: {self._source.name} has too few documents for "
                            f"{self._streams} rows per step: lower batch_size or "
                            "gradient_accumulation_steps"
                        )
        return self._text

    def advance(self) -> None:
        """Go on to the next document."""
        self._text, self._document = None, self._document + 1

    def _own(self) -> range | np.ndarray:
        """The numbers of its parts, in the order of this pass."""
        count = len(self._parts)
        if self._seed is None:
            return range(self._stream, count, self._streams)
        order = np.random.default_rng([self._seed, self._pass]).permutation(count)
        return order[self._stream :: self._streams]

    def _opened(self) -> Iterator[str]:
        number, skip = int(self._own()[self._part]), self._document
        for index, block in enumerate(shards.blocks(self._parts[number], self._source.column)):
            if skip >= len(block):
                skip -= len(block)
                continue
            if self._seed is not None:
                random = np.random.default_rng([self._seed, self._pass, number, index])
                block = [block[place] for place in random.permutation(len(block))]
            yield from block[skip:]
            skip = 0


class RowStream:
    """The rows of one logical stream, each filled with documents and parts of documents.

    A document that is longer than what is left of a row goes on in the next row, which begins with
    its last token again, so that each token but a document's first is predicted once. The next
    document is one of the source whose tokens so far are least against its weight.

    Args:
        cursors: of each source. weights: of each source.
        length: tokens of a row.
        state: as `state` returned it.
    """

    def __init__(
        self,
        cursors: list[Cursor],
        weights: list[float],
        tokenizer: Any,
        length: int,
        state: dict[str, Any],
    ) -> None:
        self._cursors, self._weights = cursors, weights
        self._tokenizer, self._length = tokenizer, length
        self._taken: list[int] = list(state["taken"])
        self._source: int | None
        self._offset: int
        self._source, self._offset = state["open"] or (None, 0)
        self._tokens: np.ndarray | None = None

    @property
    def state(self) -> dict[str, Any]:
        """Where it is. taken: tokens of each source. open: a source, and the next token in it."""
        return {
            "places": [cursor.place for cursor in self._cursors],
            "taken": list(self._taken),
            "open": None if self._source is None else [self._source, self._offset],
        }

    def row(self) -> Row:
        """The next row; at most one position of it is left free."""
        pieces, room = [], self._length
        while room > 1:
            if self._source is None:
                self._source, self._offset = self._next_source(), 0
            tokens = self._document(self._source)
            piece = tokens[self._offset : self._offset + room]
            if len(piece) > 1:
                # Without one that comes before it, no token is predicted.
                pieces.append((piece, np.ones(len(piece), dtype=bool)))
                room -= len(piece)
            end = self._offset + len(piece)
            if end >= len(tokens):
                self._taken[self._source] += len(tokens)
                self._cursors[self._source].advance()
                self._source = self._tokens = None
            else:
                self._offset = end - 1
        return Row(pieces, True, [0.0] * len(pieces))

    def _next_source(self) -> int:
        shares = [n / weight for n, weight in zip(self._taken, self._weights, strict=True)]
        return shares.index(min(shares))

    def _document(self, source: int) -> np.ndarray:
        if self._tokens is None:
            text = self._cursors[source].text()
            self._tokens = np.asarray(encoded(self._tokenizer, text), dtype=np.int32)
        return self._tokens


@dataclass(frozen=True)
class Recipe:
    """All that the streams are made of.

    parts: of each source. seed: of the order, None keeps the files' own. streams: rows of a step.
    """

    sources: list[Source]
    parts: list[list[shards.Part]]
    tokenizer: Any
    length: int
    seed: int | None
    streams: int

    def start(self, stream: int) -> dict[str, Any]:
        """The state in which a stream begins: the sources' turns are not the same in all."""
        random = np.random.default_rng([self.seed or 0, stream, len(self.sources)])
        taken = (random.random(len(self.sources)) * self.length).astype(int).tolist()
        places = [[0, 0, 0] for _ in self.sources]
        return {"places": places, "taken": taken, "open": None}

    def rows(self, stream: int, state: dict[str, Any]) -> RowStream:
        """A stream that goes on from a state."""
        cursors = [
            Cursor(source, parts, stream, self.streams, self.seed, place)
            for source, parts, place in zip(self.sources, self.parts, state["places"], strict=True)
        ]
        weights = [source.weight for source in self.sources]
        return RowStream(cursors, weights, self.tokenizer, self.length, state)


class _Own(IterableDataset):
    """One worker's streams of this rank: by step, (stream, row, state after it) of each.

    A fault is an item too: raised in a worker it would lose its kind.
    """

    def __init__(self, recipe: Recipe, states: dict[int, dict[str, Any]]) -> None:
        self._recipe, self._states = recipe, states

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        numbers = list(self._states)[worker::workers]
        streams = {n: self._recipe.rows(n, self._states[n]) for n in numbers}
        while True:
            try:
                yield [(n, stream.row(), stream.state) for n, stream in streams.items()]
            except ConfigError as error:
                yield error
                return


class StreamBatches:
    """Global batches of a stream; see `Batches`, whose interface it has.

    Args:
        sha256: of what the order of the data depends on.
        multiple: what the length of every row must be divisible by.
    """

    def __init__(
        self,
        recipe: Recipe,
        world: World,
        batch_size: int,
        *,
        micro_steps: int,
        total_steps: int,
        sha256: str,
        collator: Collator,
        workers: int = 0,
    ) -> None:
        self.recipe, self._world, self._collator = recipe, world, collator
        self._batch_size, self._sha256 = batch_size, sha256
        self.samples_per_step = recipe.streams
        self.total_steps = self.steps_per_epoch = total_steps
        self.own = [
            (micro * world.data_size + world.data_rank) * batch_size + index
            for micro in range(micro_steps)
            for index in range(batch_size)
        ]
        self._workers = min(workers, len(self.own))
        # This rank's streams, by the number of steps that they have given rows for.
        self._states = {0: {stream: recipe.start(stream) for stream in self.own}}

    def epoch_of(self, step: int) -> int:
        """A stream has one epoch."""
        return 0

    def state(self, step: int) -> dict[str, Any]:
        """The state of every stream after `step` steps; all ranks call this together."""
        gathered = self._world.gather(self._states[step])
        return {str(n): state for own in gathered for n, state in own.items()}

    def restore(self, step: int, state: dict[str, Any] | None) -> None:
        """Go on from what `state` returned, whatever the layout was."""
        if state is None:
            raise ConfigError(
                f"checkpoints/step_{step} does not say where the stream was: it is of a run "
                "without one; submit a new run"
            )
        self._states = {step: {stream: state[str(stream)] for stream in self.own}}

    def from_step(self, step: int) -> Iterator[list[MicroBatch]]:
        """This rank's micro-batches, one list per step, from step index `step` to the last."""
        loader = DataLoader(
            _Own(self.recipe, self._states[step]),
            batch_size=None,
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
            found = [
                self._collator.collate([rows[stream] for stream in self.own[begin : begin + size]])
                for begin in range(0, len(self.own), size)
            ]
            yield [batch.pin_memory() for batch in found] if pinned else found

    @property
    def identity(self) -> dict[str, Any]:
        """See `Batches.identity`."""
        return {
            "dataset_sha256": self._sha256,
            "packed_row_length": self._collator.length,
            "samples_per_step": self.samples_per_step,
        }

    @property
    def described(self) -> str:
        """What it is, in words."""
        sources = self.recipe.sources
        total = sum(source.weight for source in sources)
        size = sum(path.stat().st_size for source in sources for path in source.files)
        shares = ", ".join(f"{100 * s.weight / total:.0f} % {s.name}" for s in sources)
        return (
            f"a stream of {size / 2**30:,.1f} GiB in packed rows of {self._collator.length:,} "
            f"tokens: {shares}"
        )

    def faults(self, key: str, vocab_size: int, max_seq_len: int) -> list[str]:
        """See `Batches.faults`; that every token is known follows from the vocabularies."""
        found = []
        if self._collator.length is not None and self._collator.length > max_seq_len:
            found.append(
                f"{key}: rows of {self._collator.length} tokens, the model takes {max_seq_len}; "
                f"set tokenizer.max_seq_len={max_seq_len}"
            )
        size = getattr(self.recipe.tokenizer, "vocab_size", 0)
        if size > vocab_size:
            found.append(
                f"tokenizer: it has {size} tokens, the model knows {vocab_size}; tokenizer and "
                "model do not belong together"
            )
        return found


def faults(config: TrainConfig) -> list[str]:
    """What of a config with a stream cannot work, one line each; no file is read."""
    if config.dataset["_component_"] != STREAM:
        return []
    found = []
    if not config.max_steps:
        found.append("max_steps: a stream has no end; set max_steps to the number of steps")
    for key in ("max_steps_per_epoch", "dataset.split"):
        block, _, name = key.rpartition(".")
        if (config.dataset if block else vars(config)).get(name):
            found.append(f"{key}: a stream has no epochs and no splits; leave it out")
    if config.dataset_val and config.dataset_val["_component_"] == STREAM:
        found.append(
            "dataset_val: is measured whole, so it cannot be a stream; set dataset_val._component_="
            "torchtune.datasets.text_completion_dataset with source, data_files and column"
        )
    return found


def build(config: TrainConfig, world: World) -> Data:
    """The batches of a stream, and those of dataset_val, which is tokenised as a whole.

    Raises:
        ConfigError: tokenizer or files cannot be read, or the config does not fit a stream.
    """
    if found := faults(config):
        raise ConfigError(*found)
    tokenizer = world.on_all(lambda: instantiate("tokenizer", config.tokenizer))
    mismatches = world.on_all(lambda: tokenizers.faults(tokenizer, config.model_folder))
    streams = config.batch_size * config.gradient_accumulation_steps * world.data_size

    # Rank 0 alone looks at all files.
    def find() -> tuple[list[Source], list[list[shards.Part]], str]:
        sources = instantiate("dataset", config.dataset, tokenizer).sources
        parts = [shards.parts_of(source.files, streams) for source in sources]
        for source, own in zip(sources, parts, strict=True):
            if not own:
                raise ConfigError(f"dataset.sources: {source.name} holds no text")
        content = [config.tokenizer, *(source.identity for source in sources)]
        content += [files.sha256(path) for path in tokenizer_files(config.tokenizer)]
        return sources, parts, hashlib.sha256(repr(content).encode()).hexdigest()[:16]

    found_there = world.on_main(find)
    sources, parts, sha256 = world.gather(found_there)[0]
    seed = config.seed if config.shuffle else None
    length = int(config.tokenizer["max_seq_len"])
    recipe = Recipe(sources, parts, tokenizer, length, seed, streams)
    training = StreamBatches(
        recipe,
        world,
        config.batch_size,
        micro_steps=config.gradient_accumulation_steps,
        total_steps=int(config.max_steps or 0),
        sha256=sha256,
        collator=Collator(getattr(tokenizer, "pad_id", 0), config.row_multiple, length),
        workers=batches.workers(config, world),
    )
    return Data(training, batches.validation(config, world, tokenizer), mismatches)
