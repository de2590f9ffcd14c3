"""One logical stream of a mixture: its place in each source, and the rows that it fills."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data import shards
from trainer.data.batches import Row
from trainer.errors import ConfigError


@dataclass(frozen=True)
class TextSource:
    """Texts of one kind."""

    name: str
    files: list[Path]
    column: str
    # Its share of the tokens, relative to the others'.
    weight: float

    @property
    def identity(self) -> list[Any]:
        """What its order of documents depends on; a folder may move."""
        sizes = [(path.name, path.stat().st_size) for path in self.files]
        return [self.column, self.weight, sizes]


def encoded(tokenizer: Any, text: str) -> list[int]:
    """A document's tokens, between the begin token, if the model has one, and the end token."""
    tokens: list[int] = tokenizer.encode(text, add_bos=True, add_eos=True)
    return tokens


@dataclass(frozen=True)
class Mixture:
    """All that the streams are made of."""

    sources: list[TextSource]
    # Of each source.
    parts: list[list[shards.Part]]
    tokenizer: Any
    # Tokens of a row.
    length: int
    # Of the order; None keeps the files' own.
    seed: int | None
    # Rows of a step.
    streams: int
    # How many tokens the model knows.
    vocab_size: float

    def start(self, stream: int) -> dict[str, Any]:
        """The state in which a stream begins: the sources' turns are not the same in all."""
        random = np.random.default_rng([self.seed or 0, stream, len(self.sources)])
        taken = (random.random(len(self.sources)) * self.length).astype(int).tolist()
        places = [[0, 0, 0] for _ in self.sources]
        return {"places": places, "taken": taken, "open": None}


class Cursor:
    """Where one stream is in one source, of whose parts it reads its own.

    Args:
        source: its number in the mixture.
        stream: the number of this stream.
        place: (pass over its parts, part, document in it), as `place` returned it.
    """

    def __init__(self, mixture: Mixture, source: int, stream: int, place: list[int]) -> None:
        self._source, self._parts = mixture.sources[source], mixture.parts[source]
        self._seed, self._stream, self._streams = mixture.seed, stream, mixture.streams
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

    @property
    def file(self) -> str:
        """The path of the current document's file."""
        return self._parts[int(self._own()[self._part])].path

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

    A document that is longer than the rest of a row continues in the next row, which begins with
    its last token again, so that each token but a document's first is predicted once. The next
    document is one of the source whose tokens so far are least against its weight.

    Args:
        stream: its number.
        state: as `state` returned it, or `Mixture.start`.
    """

    def __init__(self, mixture: Mixture, stream: int, state: dict[str, Any]) -> None:
        self._mixture = mixture
        self._cursors = [
            Cursor(mixture, source, stream, place) for source, place in enumerate(state["places"])
        ]
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
        pieces, room = [], self._mixture.length
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
        return Row(pieces, True, np.arange(len(pieces)))

    def _next_source(self) -> int:
        sources = self._mixture.sources
        shares = [n / source.weight for n, source in zip(self._taken, sources, strict=True)]
        return shares.index(min(shares))

    def _document(self, source: int) -> np.ndarray:
        if self._tokens is None:
            tokenizer, known = self._mixture.tokenizer, self._mixture.vocab_size
            text = self._cursors[source].text()
            self._tokens = np.asarray(encoded(tokenizer, text), dtype=np.int32)
            if (highest := int(self._tokens.max(initial=0))) >= known:
                # Such as the one for images, which Gemma 3 1B's tokenizer has and its model not.
                raise ConfigError(
                    f"dataset.sources: a document of {self._cursors[source].file} has token "
                    f"{highest} ({tokenizer.token(highest)}), "
                    f"the model knows {known} tokens, from 0; remove it from the text, "
                    "or give the model's own tokenizer"
                )
        return self._tokens
