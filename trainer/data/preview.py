"""What training makes of a dataset's first samples, decoded, with the trained tokens marked.

It reads, cuts, packs and labels them by the code that training uses, and keeps nothing on disk.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from trainer.config import TrainConfig, instantiate
from trainer.data.batches import Rows, packed_rows
from trainer.data.checks import ALL_SHARED, shared_splits
from trainer.data.form import SINGLE, SampleForm
from trainer.data.source import Piece, Source, omission_notes, open_source, read_block
from trainer.errors import ConfigError
from trainer.layers.batch import IGNORE_INDEX

# Number of samples that are counted, and of faults whose line is named.
FIRST = 1000
FAULTS = 20
# Number of training samples that are compared with those of the validation data.
COMPARED = 20_000
# Maximum bytes of a character in UTF-8, and so of the tokens that it is in.
LONGEST_CHARACTER = 4
# What decoding puts in the place of bytes that are no character, or not yet.
INCOMPLETE = "\ufffd"


class FirstSamples:
    """The first samples of a dataset, as TokenisedDataset has all of them."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self.lengths = np.array([len(piece.tokens) for piece in pieces], dtype=np.int64)
        lengths = [piece.lengths for piece in pieces]
        self.documents = np.array(lengths, dtype=np.int64) if pieces else np.zeros((0, 1), int)
        self.numbers = np.array([piece.number for piece in pieces])

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens int32 [n], trained bool [n]) of a sample."""
        piece = self._pieces[index]
        return piece.tokens, piece.trained


def previews(
    config: TrainConfig, count: int, form: SampleForm = SINGLE
) -> tuple[list[dict[str, Any]], list[str]]:
    """What training sees of dataset and dataset_val, and what keeps it from being seen.

    Args:
        count: how many samples of each are decoded; the first FIRST are counted.
        form: what the method reads of a sample.

    Returns:
        For each dataset that can be read a JSON object, see `_preview`; and the faults of tokenizer
        and samples, a line each, with file and line.
    """
    previewed: list[dict[str, Any]] = []
    faults: list[str] = []
    sources: list[Source] = []
    try:
        tokenizer = instantiate("tokenizer", config.tokenizer)
    except ConfigError as error:
        return [], list(error.faults)
    for key in ("dataset", "dataset_val"):
        block = getattr(config, key)
        if block is not None:
            try:
                share = form.share(block)
                source = open_source(key, read_block(block, form), tokenizer, form, share)
                previewed.append(_preview(source, config, block, tokenizer, count, faults))
                sources.append(source)
            except ConfigError as error:
                faults += error.faults
    if len(sources) == 2:
        training, validation = sources
        _compare(config, training, validation, previewed[1], faults)
    return previewed, faults


def _compare(
    config: TrainConfig,
    training: Source,
    validation: Source,
    shown: dict[str, Any],
    faults: list[str],
) -> None:
    """Append what both hold to `faults`, if it ends the run, or to the notes of `shown`."""
    if fault := shared_splits(config, training.split_sizes):
        faults.append(fault)
        return
    same = _in_both(training, validation)
    if same == len(validation):
        faults.append(ALL_SHARED)
    elif same:
        shown["notes"].append(
            f"{same:,} of its first {shown['read']:,} samples are in dataset, too, so that the "
            "validation loss looks better than it is"
        )


def _in_both(training: Source, validation: Source) -> int:
    """How many of the first samples of `validation` are among the first ones of `training`."""

    def keys(source: Source, most: int) -> Iterator[str]:
        rows = map(source.row, range(min(most, len(source))))
        return (json.dumps(row, sort_keys=True, default=str) for row in rows if row is not None)

    known = set(keys(training, COMPARED))
    return sum(key in known for key in keys(validation, FIRST))


def _preview(
    source: Source,
    config: TrainConfig,
    block: dict[str, Any],
    tokenizer: Any,
    count: int,
    faults: list[str],
) -> dict[str, Any]:
    """Counts over the first samples, how full their packed rows are, and the decoded ones.

    Appends to `faults` those of samples that cannot be tokenised.
    """
    read = min(FIRST, len(source))
    pieces: list[Piece] = []
    places: list[tuple[int, int, int]] = []  # sample, number and count of its pieces
    wrong = 0
    for index in range(read):
        try:
            own = source.pieces(index)
        except ConfigError as error:
            wrong += 1
            if wrong <= FAULTS:
                faults += error.faults
            continue
        pieces += own
        places += [(index, number, len(own)) for number in range(1, len(own) + 1)]
    if wrong > FAULTS:
        more = f"{wrong - FAULTS:,} more of its first {read:,} samples cannot be tokenised"
        faults.append(f"{source.key}: {more}")
    notes = omission_notes(source.omissions, read)
    if notes and not pieces and not wrong and read == len(source):
        faults.append(f"{source.key}: no sample can be trained: {'; '.join(notes)}")
        wrong, notes = read, []
    samples = FirstSamples(pieces)
    seed = config.seed if config.shuffle and source.key == "dataset" else None
    alone = Rows(samples, getattr(tokenizer, "pad_id", 0))
    labels = [_labels(alone, index) for index in range(len(samples))]
    targets = [int((own != IGNORE_INDEX).sum()) for own in labels]
    rows = None
    if block.get("packed") and pieces:
        packed = packed_rows(config, block, samples, tokenizer, seed)
        rows = {"count": len(packed), "length": packed.length, "filled": packed.filled}
    return {
        "key": source.key,
        "component": block["_component_"],
        "samples": len(source),
        "read": read,
        "faulty": wrong,
        "max_seq_len": config.tokenizer.get("max_seq_len"),
        "tokens": int(samples.lengths.sum()),
        "longest": int(samples.lengths.max(initial=0)),
        "trained_tokens": sum(targets),
        "truncated": sum(piece.left_out > 0 for piece in pieces),
        "left_out_tokens": sum(piece.left_out for piece in pieces),
        "split": len({index for index, _, parts in places if parts > 1}),
        "split_into": sum(parts > 1 for _, _, parts in places),
        "dropped": targets.count(0),
        "rows": rows,
        "notes": notes,
        "shown": [
            shown
            for number in range(min(count, len(pieces)))
            for shown in _shown(
                source, tokenizer, pieces[number], labels[number], number, places[number]
            )
        ],
    }


def _shown(
    source: Source,
    tokenizer: Any,
    piece: Piece,
    labels: np.ndarray,
    number: int,
    place: tuple[int, int, int],
) -> Iterator[dict[str, Any]]:
    """Each document of a sample, decoded.

    Args:
        place: the sample, and which part of how many this is of it.
    """
    ends = np.cumsum(piece.lengths)
    for which, (begin, end) in enumerate(zip(ends - piece.lengths, ends, strict=True), 1):
        own = labels[begin:end]
        yield {
            "number": number + 1,
            "origin": source.origin(place[0]),
            "part": list(place[1:]) if place[2] > 1 else None,
            "document": [which, len(ends)] if len(ends) > 1 else None,
            "tokens": int(end - begin),
            "trained_tokens": int((own != IGNORE_INDEX).sum()),
            "left_out_tokens": piece.left_out,
            "spans": spans(tokenizer, piece.tokens[begin:end].tolist(), own),
        }


def _labels(rows: Rows[FirstSamples], index: int) -> np.ndarray:
    """The label of each token of a sample, as in its batch: what the token before it predicts."""
    batch = rows.collate([rows[index]])
    parts = []
    for labels, length in zip(batch.labels.numpy(), batch.lengths, strict=True):
        parts += [[IGNORE_INDEX], labels[: length - 1]]
    return np.concatenate(parts)


def spans(tokenizer: Any, tokens: list[int], labels: np.ndarray) -> list[dict[str, Any]]:
    """A sample's text in runs of tokens that are trained, or are not.

    A character whose tokens are partly trained stands whole, among the trained ones.

    Args:
        labels: of each token itself, [tokens]; IGNORE_INDEX if it is not trained.
    """
    parts: list[dict[str, Any]] = []
    for begin, end, text in _texts(tokenizer, tokens):
        trained = bool((labels[begin:end] != IGNORE_INDEX).any())
        if not parts or parts[-1]["trained"] != trained:
            parts.append({"trained": trained, "text": ""})
        parts[-1]["text"] += text
    return parts


def _texts(tokenizer: Any, tokens: list[int]) -> Iterator[tuple[int, int, str]]:
    """(begin, end, text) of the fewest tokens that are whole characters, in turn.

    What has no text of its own is named: a control token, or a part of a character whose rest was
    cut off.
    """
    decode, names = _decoder(tokenizer), _names(tokenizer)
    before = begin = 0
    while begin < len(tokens):
        # What a token adds depends on the one before it: it may have a space at its front.
        context = decode(tokens[before:begin])
        for end in range(begin + 1, min(begin + LONGEST_CHARACTER, len(tokens)) + 1):
            text = decode(tokens[before:end])
            added = text[len(context) :] if text.startswith(context) else decode(tokens[begin:end])
            if INCOMPLETE not in added:
                break
        else:
            end, added = begin + 1, ""
        if not added:
            added = names.get(tokens[begin], f"<token {tokens[begin]}>")
        yield begin, end, added
        # A part of a character would make the next one unreadable, too.
        before, begin = (begin if INCOMPLETE not in decode(tokens[begin:end]) else end), end


def _decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """Decode tokens with special ones, and none of them as the end."""
    known = inspect.signature(tokenizer.decode).parameters
    wanted = {"skip_special_tokens": False, "truncate_at_eos": False}
    options = {name: value for name, value in wanted.items() if name in known}
    return lambda tokens: tokenizer.decode(tokens, **options) if tokens else ""


def _names(tokenizer: Any) -> dict[int, str]:
    named = getattr(tokenizer, "special_tokens", None)
    known = {index: name for name, index in named.items()} if isinstance(named, dict) else {}
    ends = {getattr(tokenizer, f"{name}_id", None): f"<{name}>" for name in ("bos", "eos", "pad")}
    return ends | known
