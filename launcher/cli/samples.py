"""What cookbook check --samples prints: counts of each dataset, and samples with their marks."""

import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

import click

# Around trained tokens, where there are no colours.
MARKS = ("[[", "]]")


def lines(datasets: Iterable[dict[str, Any]], colours: bool) -> Iterator[str]:
    """Yield the lines of what the trainer shows of each dataset."""
    for dataset in datasets:
        yield from _counts(dataset)
    if any(dataset["shown"] for dataset in datasets):
        marked = "on green, \u21b5 is a line break" if colours else f"in {' '.join(MARKS)}"
        yield f"trained tokens are {marked}"
    for dataset in datasets:
        for sample in dataset["shown"]:
            yield ""
            yield _head(dataset, sample)
            text = "".join(_span(span, colours) for span in sample["spans"])
            yield from text.split("\n")


def _counts(dataset: dict[str, Any]) -> Iterator[str]:
    read, count, limit = dataset["read"], dataset["samples"], dataset["max_seq_len"]
    which = (
        f"all {count:,} samples" if read == count else f"the first {read:,} of {count:,} samples"
    )
    which = "1 sample" if count == 1 else which
    tokens, trained = dataset["tokens"], dataset["trained_tokens"]
    share = f" ({100 * trained / tokens:.1f} %)" if tokens else ""
    faulty = f", {dataset['faulty']:,} with faults" if dataset["faulty"] else ""
    counts = f"{tokens:,} tokens, {trained:,} trained{share}"
    yield f"{dataset['key']}: {which}{faulty}: {counts}"
    cut = f"{dataset['truncated']:,} truncated"
    if dataset["truncated"]:
        left_out = dataset["left_out_tokens"]
        cut += f" at tokenizer.max_seq_len={limit} ({left_out:,} tokens left out)"
    yield f"  {cut}, {dataset['dropped']:,} dropped (no token to train on)"
    if dataset["split"]:
        yield (
            f"  {dataset['split']:,} longer than tokenizer.max_seq_len={limit}: split into "
            f"{dataset['split_into']:,}, no token is left out"
        )
    for note in dataset["notes"]:
        yield f"  note: {note}"
    if rows := dataset["rows"]:
        filled = f"{100 * rows['filled']:.1f} % filled"
        yield f"  packed into {rows['count']:,} rows of {rows['length']:,} tokens, {filled}"


def _head(dataset: dict[str, Any], sample: dict[str, Any]) -> str:
    part = ", part {} of {}".format(*sample["part"]) if sample["part"] else ""
    if sample["document"]:
        part += ", document {} of {}".format(*sample["document"])
    counts = f"{sample['tokens']:,} tokens, {sample['trained_tokens']:,} trained"
    if sample["left_out_tokens"]:
        counts += f", {sample['left_out_tokens']:,} more left out"
    return f"--- {dataset['key']} {sample['number']}: {sample['origin']}{part}: {counts}"


def _span(span: dict[str, Any], colours: bool) -> str:
    text = "".join(map(_shown, span["text"]))
    if not span["trained"]:
        return text
    if not colours:
        return text.join(MARKS)
    # Line by line, so that a pager shows each line's colour.
    return "\n".join(
        click.style(line, fg="black", bg="green")
        for line in text.replace("\n", "\u21b5\n").split("\n")
    )


def _shown(character: str) -> str:
    """A character of the data; one that would command the terminal is escaped."""
    if unicodedata.category(character) == "Cc" and character not in "\n\t":
        return character.encode("unicode_escape").decode("ascii")
    return character
