"""A dataset's samples as they are trained: opened, tokenised one by one, and none beyond a row.

What is longer than tokenizer.max_seq_len is cut there, except plain text, which goes on in another
sample.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sized
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from runspec.prepared import COMPONENT
from runspec.storage import patiently
from trainer.config import instantiate
from trainer.data import origin
from trainer.data.form import SINGLE, SampleForm, cut_at
from trainer.errors import ConfigError
from trainer.layers.batch import IGNORE_INDEX

T = TypeVar("T", bound=Sized)

# Tokens int32 [n], and bool [n], which of them are trained.
Document = tuple[np.ndarray, np.ndarray]


class Piece(NamedTuple):
    """What is trained as one sample: its documents, one after the other."""

    # int32 [n]
    tokens: np.ndarray
    # bool [n], which of them are trained, if another comes before them.
    trained: np.ndarray
    # How many tokens of the sample were cut off behind these.
    left_out: int
    # Tokens of each document.
    lengths: tuple[int, ...]
    # The sample's, see SampleForm.
    number: float = 0.0

    @property
    def targets(self) -> np.ndarray:
        """Which tokens are predicted and trained, bool [n]; nothing predicts a document's first."""
        found = self.trained.copy()
        found[np.cumsum((0, *self.lengths[:-1]))] = False
        return found


class Source:
    """The samples of a dataset, opened when one is asked for, and tokenised when they are read.

    omissions: what the chat template left out of the samples that were read, in how many of them,
    and where the first of these is.

    Args:
        key: of the config, for messages.
        given: the key's content.
        tokenizer: its `max_seq_len` cuts documents, if it has one.
        form: what the method reads of a sample.

    Raises:
        ConfigError: when opened: the dataset cannot be opened, or is empty.
    """

    def __init__(
        self, key: str, given: dict[str, Any], tokenizer: Any, form: SampleForm = SINGLE
    ) -> None:
        self.key, self.given, self.form, self.tokenizer = key, given, form, tokenizer
        self.block = read_block(given, form)
        # Whether max_seq_len is for all documents of a sample together.
        self.shares_limit = form.count > 1 and bool(given.get("packed"))
        self.omissions: dict[str, tuple[int, str]] = {}
        # Its own, as reading changes the limit.
        self._tokenizer = copy.copy(tokenizer)
        self._limit: int | None = tokenizer.max_seq_len

    @cached_property
    def _samples(self) -> Any:
        return opened(
            self.key, self.block, lambda: instantiate(self.key, self.block, self._tokenizer)
        )

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def info(self) -> Any:
        """What the library `datasets` knows of the opened data; None if it did not open them."""
        return getattr(getattr(self._samples, "rows", None), "info", None)

    def pieces(self, index: int) -> list[Piece]:
        """A sample, as one piece; a text that is longer than a row, as several.

        None for a sample of several documents of which one has no answer left once it is cut, and
        for one that cannot be used, if the dataset has drop_invalid; `omissions` counts them.

        Each token of a text is trained once: a further piece begins with the last token of the one
        before it, which is not trained again, so that its first new token is predicted from one.

        Raises:
            ConfigError: the sample cannot be tokenised; names its file and line.
        """
        try:
            documents, number = self._read(index, None)
            for what in self._tokenizer.take_left_out():
                self._omitted(what, index)
            lengths = [len(tokens) for tokens, _ in documents]
            length = sum(lengths)
            if (
                self._limit is None
                or (length if self.shares_limit else max(lengths)) <= self._limit
            ):
                return [_piece(documents, 0, number)]
            if getattr(self._samples, "is_text", False) and self._limit > 1:
                return _split(*documents[0], self._limit)
            limit = cut_at(lengths, self._limit) if self.shares_limit else self._limit
            # Once more, as each tokenizer has its own way to end what it cuts.
            cut, number = self._read(index, limit)
            if len(cut) > 1 and not all(trained[1:].any() for _, trained in cut):
                room = f"{self._limit} tokens{' together' if self.shares_limit else ''}"
                self._omitted(f"the prompt leaves no room for an answer in {room}", index)
                return []
            left_out = length - sum(len(tokens) for tokens, _ in cut)
            return [_piece(cut, left_out, number)]
        except ConfigError as error:
            droppable = getattr(self._samples, "drop_invalid", None)
            if droppable:
                self._omitted(str(error), index)
                return []
            remedy = (
                "" if droppable is None else f"; or leave such out: {self.key}.drop_invalid=True"
            )
            raise ConfigError(f"{self.key}: {self.origin(index)}: {error}{remedy}") from error

    def origin(self, index: int) -> str:
        """Where a sample comes from: file and line, or source, split and index."""
        return origin.of_sample(self.block, index, self.row(index))

    def row(self, index: int) -> dict[str, Any] | None:
        """The columns of a sample before they become messages; None if the dataset keeps none."""
        return self._samples.row(index) if hasattr(self._samples, "row") else None

    def _omitted(self, what: str, index: int) -> None:
        count, first = self.omissions.get(what) or (0, self.origin(index))
        self.omissions[what] = count + 1, first

    def _read(self, index: int, limit: int | None) -> tuple[list[Document], float]:
        if self._limit is None:
            return sample(self._samples, index, None, self.form)
        self._tokenizer.max_seq_len = limit
        try:
            return sample(self._samples, index, limit, self.form)
        finally:
            self._tokenizer.max_seq_len = self._limit


def omission_notes(omissions: Mapping[str, tuple[int, str]], count: int) -> list[str]:
    """What the chat template left out of `count` samples, a line each; see Source."""
    return [
        f"{what} in {samples:,} of {count:,} samples (first: {first})"
        for what, (samples, first) in omissions.items()
    ]


def _piece(documents: list[Document], left_out: int, number: float) -> Piece:
    lengths = tuple(len(tokens) for tokens, _ in documents)
    if len(documents) == 1:
        return Piece(*documents[0], left_out, lengths, number)
    tokens, trained = (np.concatenate(parts) for parts in zip(*documents, strict=True))
    return Piece(tokens, trained, left_out, lengths, number)


def _split(tokens: np.ndarray, trained: np.ndarray, limit: int) -> list[Piece]:
    pieces = []
    for begin in range(0, len(tokens) - 1, limit - 1):
        own = trained[begin : begin + limit].copy()
        own[0] &= begin == 0
        pieces.append(Piece(tokens[begin : begin + limit], own, 0, (len(own),)))
    return pieces


def read_block(block: dict[str, Any], form: SampleForm = SINGLE) -> dict[str, Any]:
    """A dataset's block without the trainer's own keys, and with the files of a prepared set.

    Args:
        form: what the method reads of a sample.

    Raises:
        ConfigError: the prepared set is not there, or of another method.
    """
    block = {k: v for k, v in block.items() if k not in ("packed", "split_across_pack")}
    if block["_component_"] == COMPONENT:
        from trainer.data import prepared  # other runs do not pay for it

        block = prepared.by_files(block, form.preferences)
    return block


def opened(key: str, block: dict[str, Any], make: Callable[[], T]) -> T:
    """What `make` makes of the rows of a block.

    Raises:
        ConfigError: they cannot be opened, or there are none.
    """
    from datasets import disable_progress_bars
    from datasets.exceptions import DatasetGenerationError

    disable_progress_bars()
    try:
        samples = patiently(lambda _: make(), Path(key))
    except StopIteration:
        # So datasets answers to a file of no line.
        raise ConfigError(f"{key}: has no sample") from None
    except DatasetGenerationError as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise ConfigError(
            f"{key}: {origin.broken_line(block) or f'cannot be read: {reason}'}"
        ) from None
    except (OSError, ConnectionError) as error:
        raise ConfigError(f"{key}: cannot be opened: {str(error).splitlines()[0]}") from None
    if len(samples) == 0:
        split = f" (split {block['split']})" if "split" in block else ""
        raise ConfigError(f"{key}: has no sample{split}")
    return samples


def sample(
    samples: Any, index: int, limit: int | None, form: SampleForm = SINGLE
) -> tuple[list[Document], float]:
    """The documents of a sample, of `limit` tokens at most each, and the sample's number.

    Raises:
        ConfigError: a message, column or key is missing, or the labels are not the tokens.
    """
    try:
        made = samples[index]
    except KeyError as error:
        raise ConfigError(f"there is no column {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(str(error)) from error
    wanted = {key for keys in form.documents for key in keys} | ({form.number} - {""})
    if missing := sorted(wanted - made.keys()):
        raise ConfigError(
            f"its component gives {', '.join(map(str, made))}, and the method needs "
            f"{', '.join(missing)}; set dataset._component_ to one for the method"
        )
    documents = [_document(made[t], made[labels], limit) for t, labels in form.documents]
    number = float(made[form.number]) if form.number else 0.0
    if not math.isfinite(number):
        raise ConfigError(f"its {form.number} is {number}; it must be a finite number")
    return documents, number


def _document(tokens: Any, labels: Any, limit: int | None) -> Document:
    tokens = np.asarray(tokens, dtype=np.int32)[:limit]
    labels = np.asarray(labels, dtype=np.int64)[:limit]
    trained = labels != IGNORE_INDEX
    if tokens.ndim != 1 or not len(tokens) or tokens.shape != labels.shape:
        raise ConfigError("has no tokens, or not as many labels as tokens")
    if not np.array_equal(labels[trained], tokens[trained]):
        raise ConfigError("its labels are not its tokens; only these can be trained")
    return tokens, trained
