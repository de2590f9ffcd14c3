"""Decontamination: rows that contain items of an evaluation set are removed.

An item of `ngram` words or more is found by its word n-grams, as for GPT-3 (Brown et al. 2020,
appendix C), with 13 words by default. A shorter one is compared as a unit with each prompt, turn
and answer.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plugins.data import openers
from plugins.data.datarecipe import source_type
from plugins.data.errors import DataError
from plugins.data.ingest import records
from plugins.data.rows import Rows, Work
from plugins.data.sources import matches
from plugins.data.steps.filters import keep
from runspec.files import parse_json

NGRAM = 13
# Minimum words and characters of a short item to be compared. A question of this length is
# specific; an answer of a few words fits many questions.
ASKED, ANSWERED = (3, 10), (8, 32)
# A short text that occurs more often in an evaluation set is a choice or a phrase, not an item.
MOST_TIMES = 10
# Separates a question from the text around it in a paragraph.
_WITHIN = r"\n|:\s"


def decontaminate(rows: Rows, work: Work) -> Rows:
    """Remove rows that share at least `min_hits` n-grams, or a short item, with files `against`."""
    import numpy as np
    import pyarrow as pa

    from plugins.data.text import shingles, split

    names = work.options["against"]
    names = [names] if isinstance(names, str) else list(names)
    ngram = int(work.options.get("ngram", NGRAM))
    paths = [path for name in names for path in matches({"path": name}, work.base, work.where)]
    texts = pa.array([text for path in paths for text in _texts(path, work.where)], pa.string())
    words = np.diff(split(texts).offsets.to_numpy())
    long, short = texts.filter(words >= ngram), texts.filter(words < ngram)
    hashes, _ = shingles(long, ngram)
    asked, answered = _short_items(short)
    if not len(long) and not len(asked):
        raise DataError(
            f"{work.where}.against: {', '.join(names)}: has no text of {ASKED[0]} words and "
            f"{ASKED[1]} characters or more: give evaluation sets"
        )
    work.folder.mkdir(parents=True, exist_ok=True)
    known = {"ngrams": np.unique(hashes), "asked": asked, "answered": answered}
    for name, values in known.items():
        np.save(work.folder / f"{name}.npy", values)
    work.notes["evaluation_texts"] = len(texts)
    work.notes["compared"] = {"by_ngrams": len(long), "whole": len(asked)}
    options = {
        "known": str(work.folder),
        "ngram": ngram,
        "min_hits": int(work.options.get("min_hits", 1)),
        # A longer text matches no short item, unless it is mostly punctuation.
        "longest": 64 + 2 * max(map(len, short.to_pylist()), default=0),
    }
    made = work.map(rows, "marked", "plugins.data.steps.decontaminate:mark", options)
    kept = keep(made, work, ~made.table["_seen"])
    return kept.kept(kept.table.drop("_seen"), kept.count)


def _short_items(texts: Any) -> tuple[Any, Any]:
    """Return the hashes of short items to compare with questions, and with answers."""
    import numpy as np

    from plugins.data.text import hashes_of, plain, weight

    made = plain(texts)
    words, letters = weight(made)
    hashes, places, times = np.unique(hashes_of(made), return_index=True, return_counts=True)
    words, letters, rare = words[places], letters[places], times <= MOST_TIMES

    def enough(least: tuple[int, int]) -> Any:
        return hashes[rare & (words >= least[0]) & (letters >= least[1])]

    return enough(ASKED), enough(ANSWERED)


def _texts(path: Path, where: str) -> list[str]:
    """Return all texts of an evaluation set: each text of a record, in any column."""
    kind = source_type({}, path)
    if kind == "parquet":
        import pyarrow.parquet as pq

        return [text for row in pq.read_table(path).to_pylist() for text in _strings(row)]
    encoding = openers.encoding_of(path, None, where)
    block = {"file": str(path), "type": kind, "encoding": encoding}
    if kind == "json":
        # Of any nesting, such as SQuAD's.
        try:
            return _strings(parse_json(openers.whole(block).decode(encoding)))
        except ValueError as error:
            raise DataError(f"{where}.against: {path}: not JSON: {error}: fix it") from None
    if kind is None:
        return [line.decode(errors="replace") for line in openers.lines(block) if line.strip()]
    texts = []
    for line, record, fault in records(block):
        if fault:
            raise DataError(f"{where}.against: {path}, line {line}: {fault}: fix the file")
        texts += _strings(record)
    return texts


def _strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [text for each in value for text in _strings(each)]
    return [value] if isinstance(value, str) else []


# Arrow function ------------------------------------------------------------------------------


def mark(table: Any, known: str, ngram: int, min_hits: int, longest: int) -> Any:
    """Return the rows with the column _seen: whether they contain evaluation items.

    known: the folder with the hashes. longest: maximum characters of a short item.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    from plugins.data.text import hashes_of, plain, shingles, texts

    hashes = {name: np.load(f"{known}/{name}.npy") for name in ("ngrams", "asked", "answered")}
    seen = np.zeros(len(table), bool)
    wholes = [texts(table)]
    if table["rejected"].null_count < len(table):
        wholes.append(texts(table, "rejected"))
    for whole in wholes if len(hashes["ngrams"]) else ():
        grams, starts = shingles(whole, ngram)
        total = np.concatenate([[0], np.cumsum(np.isin(grams, hashes["ngrams"]))])
        seen |= total[starts[1:]] - total[starts[:-1]] >= min_hits
    for name, rows, values in _parts(table):
        short = pc.less_equal(pc.utf8_length(values), longest)
        hits = np.isin(hashes_of(plain(values.filter(short))), hashes[name])
        seen[rows[short.to_numpy(zero_copy_only=False)][hits]] = True
    return table.append_column("_seen", pa.array(seen, pa.bool_()))


def _pieces(text: str) -> set[str]:
    return {text, *text.split("\n\n"), *re.split(_WITHIN, text)}


def _parts(table: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield asked or answered, numbers of rows, and texts of these rows to compare.

    A prompt is compared as a unit, by paragraph, by line and by what follows a colon, because an
    instruction or "Question: " may precede a question.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    columns = {
        name: table[name].cast(pa.string()).combine_chunks()
        for name in ("prompt", "answer", "messages", "rejected")
    }
    prompt, answer, messages = (columns[name] for name in ("prompt", "answer", "messages"))

    def where(condition: Any) -> Any:
        return np.flatnonzero(condition.to_numpy(zero_copy_only=False))

    # The prompt of a longer conversation is all of its turns.
    rows = where(pc.and_(pc.is_valid(prompt), pc.is_null(messages)))
    parts = pc.split_pattern(prompt.take(pa.array(rows)), "\n\n")
    numbers = pc.list_parent_indices(parts).to_numpy(zero_copy_only=False)
    yield "asked", rows[numbers], parts.flatten()
    several = rows[pc.list_value_length(parts).to_numpy(zero_copy_only=False) > 1]
    yield "asked", several, prompt.take(pa.array(several))
    rows = rows[pc.match_substring_regex(prompt.take(pa.array(rows)), _WITHIN).to_numpy(False)]
    parts = pc.split_pattern_regex(prompt.take(pa.array(rows)), _WITHIN)
    yield "asked", rows[pc.list_parent_indices(parts).to_numpy(False)], parts.flatten()
    rows = where(pc.is_valid(prompt))
    yield "answered", rows, pc.fill_null(answer.take(pa.array(rows)), "")
    # A text without a prompt may be a question or an answer.
    rows = where(pc.is_null(prompt))
    yield "asked", rows, pc.fill_null(answer.take(pa.array(rows)), "")
    rows = where(pc.is_valid(columns["rejected"]))
    yield "answered", rows, columns["rejected"].take(pa.array(rows))
    rows = where(pc.is_valid(messages))
    turns = [
        (row, turn["role"], turn["content"])
        for row, text in zip(rows.tolist(), messages.take(pa.array(rows)).to_pylist(), strict=True)
        for turn in parse_json(text)
    ]
    for name in ("asked", "answered"):
        of_role = [
            (row, part)
            for row, role, content in turns
            if (role == "assistant") == (name == "answered")
            for part in (_pieces(content) if name == "asked" else (content,))
        ]
        rows = np.array([row for row, _ in of_role], np.int64)
        yield name, rows, pa.array([part for _, part in of_role], pa.string())
