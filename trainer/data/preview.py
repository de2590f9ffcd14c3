"""What training makes of a dataset's first samples, decoded, with the trained tokens marked.

It reads, cuts, packs and labels them by the code that training uses, and keeps nothing on disk.
"""

import inspect
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from trainer.config import ALL_SHARED, TrainConfig
from trainer.data import tokenizers
from trainer.data.batches import Collator
from trainer.data.form import SINGLE, SampleForm
from trainer.data.packing import pack
from trainer.data.source import Piece, Source, omission_notes
from trainer.errors import ConfigError

# Number of samples that are counted, and of faults whose line is named.
FIRST = 1000
FAULTS = 20
# Number of training samples that are compared with those of the validation data.
COMPARED = 20_000
# What decoding puts in the place of bytes that are no character, or not yet.
INCOMPLETE = "\ufffd"


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
        tokenizer = tokenizers.of_block(config.tokenizer)
    except ConfigError as error:
        return [], list(error.faults)
    for key in ("dataset", "dataset_val"):
        block = getattr(config, key)
        if block is not None:
            try:
                source = Source(key, block, tokenizer, form)
                previewed.append(_preview(source, config, count, faults))
                sources.append(source)
            except ConfigError as error:
                faults += error.faults
    if len(sources) == 2:
        _compare(sources[0], sources[1], previewed[1], faults)
    return previewed, faults


def _compare(
    training: Source, validation: Source, shown: dict[str, Any], faults: list[str]
) -> None:
    """Append what both hold to `faults`, if it is all, or to the notes of `shown`."""

    def keys(source: Source, most: int) -> Iterator[str]:
        rows = map(source.row, range(min(most, len(source))))
        return (json.dumps(row, sort_keys=True, default=str) for row in rows if row is not None)

    known = set(keys(training, COMPARED))
    same = sum(key in known for key in keys(validation, FIRST))
    if same == len(validation):
        faults.append(ALL_SHARED)
    elif same:
        shown["notes"].append(
            f"{same:,} of its first {shown['read']:,} samples are in dataset, too, so that the "
            "validation loss looks better than it is"
        )


class _First(NamedTuple):
    """A piece of one of the first samples."""

    piece: Piece
    # The sample, and which of how many of its pieces this is.
    sample: int
    part: int
    parts: int


def _read(source: Source, count: int, faults: list[str]) -> tuple[list[_First], int]:
    """The first samples, and how many cannot be tokenised; appends their faults."""
    read: list[_First] = []
    wrong = 0
    for index in range(count):
        try:
            pieces = source.pieces(index)
        except ConfigError as error:
            wrong += 1
            if wrong <= FAULTS:
                faults += error.faults
            continue
        read += [_First(each, index, part, len(pieces)) for part, each in enumerate(pieces, 1)]
    if wrong > FAULTS:
        more = f"{wrong - FAULTS:,} more of its first {count:,} samples cannot be tokenised"
        faults.append(f"{source.key}: {more}")
    return read, wrong


def _preview(source: Source, config: TrainConfig, count: int, faults: list[str]) -> dict[str, Any]:
    """Counts over the first samples, how full their packed rows are, and the decoded ones.

    Appends to `faults` those of samples that cannot be tokenised.
    """
    number = min(FIRST, len(source))
    read, wrong = _read(source, number, faults)
    notes = omission_notes(source.omissions, number)
    if notes and not read and not wrong and number == len(source):
        faults.append(f"{source.key}: no sample can be trained: {'; '.join(notes)}")
        wrong, notes = number, []
    lengths = np.array([len(each.piece.tokens) for each in read], dtype=np.int64)
    targets = [int(each.piece.targets.sum()) for each in read]
    left_out = [each.piece.left_out for each in read if each.piece.left_out]
    split = [each.sample for each in read if each.parts > 1]
    return {
        "key": source.key,
        "samples": len(source),
        "read": number,
        "faulty": wrong,
        "max_seq_len": config.tokenizer.get("max_seq_len"),
        "tokens": int(lengths.sum()),
        "longest": int(lengths.max(initial=0)),
        "trained_tokens": sum(targets),
        "truncated": len(left_out),
        "left_out_tokens": sum(left_out),
        "split": len(set(split)),
        "split_into": len(split),
        "dropped": targets.count(0),
        "rows": _rows(source, config, lengths) if source.given.get("packed") and read else None,
        "notes": notes,
        "shown": [
            shown
            for place, each in enumerate(read[:count], 1)
            for shown in _shown(source, each, place)
        ],
    }


def _rows(source: Source, config: TrainConfig, lengths: np.ndarray) -> dict[str, Any]:
    """How many packed rows the samples fill, and how far."""
    limit = config.tokenizer["max_seq_len"]
    # The loop has no order for dataset_val.
    seed = config.seed if config.shuffle and source.key == "dataset" else None
    length = Collator(0, config.row_multiple, limit).length or limit
    count = len(pack(lengths, limit, seed))
    return {"count": count, "length": length, "filled": float(lengths.sum()) / (count * length)}


def _shown(source: Source, each: _First, number: int) -> Iterator[dict[str, Any]]:
    """Each document of a sample, decoded."""
    piece, targets = each.piece, each.piece.targets
    ends = np.cumsum(piece.lengths)
    for which, (begin, end) in enumerate(zip(ends - piece.lengths, ends, strict=True), 1):
        yield {
            "number": number,
            "origin": source.origin(each.sample),
            "part": [each.part, each.parts] if each.parts > 1 else None,
            "document": [which, len(ends)] if len(ends) > 1 else None,
            "tokens": int(end - begin),
            "trained_tokens": int(targets[begin:end].sum()),
            "left_out_tokens": piece.left_out,
            "spans": spans(source.tokenizer, piece.tokens[begin:end].tolist(), targets[begin:end]),
        }


def spans(tokenizer: Any, tokens: list[int], trained: np.ndarray) -> list[dict[str, Any]]:
    """A sample's text in runs of tokens that are trained, or are not.

    A character whose tokens are in two runs is in the second one; one that was cut is left out.

    Args:
        trained: bool [tokens].
    """
    decode = _decoder(tokenizer)
    begins = [0, *(np.flatnonzero(trained[1:] != trained[:-1]) + 1).tolist()]
    # What a token adds depends on those before it: it may have a space at its front.
    texts = [decode(tokens[:end]).strip(INCOMPLETE) for end in [*begins, len(tokens)]]
    runs = zip(begins, texts, texts[1:], strict=False)
    return [
        {"trained": bool(trained[begin]), "text": own}
        for begin, before, text in runs
        if (own := text[len(before) :])
    ]


def _decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """Decode tokens with special ones, and none of them as the end."""
    known = inspect.signature(tokenizer.decode).parameters
    wanted = {"skip_special_tokens": False, "truncate_at_eos": False}
    options = {name: value for name, value in wanted.items() if name in known}
    return lambda tokens: tokenizer.decode(tokens, **options) if tokens else ""
