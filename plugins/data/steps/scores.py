"""Scores of a row by Arrow functions: its language, and whether it reads like prose."""

from functools import cache
from typing import Any

from plugins.data.errors import DataError
from plugins.data.rows import Rows, Work
from plugins.data.steps.filters import between, keep


def language(rows: Rows, work: Work) -> Rows:
    """Keep the rows in one of the languages `keep` (ISO 639-1 codes), and add the column language.

    The classifier is py3langid, a Python version of langid (Lui and Baldwin 2012).
    """
    wanted = work.options["keep"]
    wanted = [wanted] if isinstance(wanted, str) else [str(name) for name in wanted]
    known = list(_classifier().labels)
    if unknown := [name for name in wanted if name not in known]:
        raise DataError(
            f"{work.where}: the language {unknown[0]!r} is not known: write codes such as en, de",
            exit_code=2,
        )
    options = {"column": work.options.get("column", "text")}
    made = work.map(rows, "scored", "plugins.data.steps.scores:add_language", options)
    counts = work.engine.rows(made.table.group_by("language").agg(n=made.table.count()))
    counts.sort(key=lambda row: (-row["n"], row["language"]))
    work.notes["languages"] = {row["language"]: row["n"] for row in counts[:20]}
    return keep(made, work, made.table.language.isin(wanted))


def quality(rows: Rows, work: Work) -> Rows:
    """Add the column quality_score, the share of five rules that a text meets; filter by min.

    The rules follow Gopher's (Rae et al. 2021, table A1): mean length of words 3 to 10; at least
    0.7 of the characters that are no white space are letters; at most 0.1 symbols (# and ...) per
    word; at least 0.3 of the words are different; less than 0.3 of the lines begin with a bullet.
    """
    options = {"column": work.options.get("column", "text")}
    made = work.map(rows, "scored", "plugins.data.steps.scores:add_quality", options)
    least = {"min": work.options.get("min", 0.6)}
    return keep(made, work, between(made.table.quality_score, least))


# Arrow functions -----------------------------------------------------------------------------


@cache
def _classifier() -> Any:
    from py3langid import langid

    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE)


def add_language(table: Any, column: str) -> Any:
    """Return the rows with the column language."""
    import pyarrow as pa

    from plugins.data.text import texts, with_column

    classify = _classifier().classify
    codes = [classify(text[:2000])[0] for text in texts(table, column).to_pylist()]
    return with_column(table, "language", pa.array(codes, pa.string()))


def add_quality(table: Any, column: str) -> Any:
    """Return the rows with the column quality_score."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    from plugins.data.text import split, texts, with_column

    values = texts(table, column)

    def count(pattern: str) -> Any:
        return pc.count_substring_regex(values, pattern).to_numpy(zero_copy_only=False)

    lists = split(values)
    lengths = pc.utf8_length(lists.flatten()).to_numpy(zero_copy_only=False)
    offsets = lists.offsets.to_numpy().astype(np.int64)
    offsets = offsets - offsets[0]
    words = np.maximum(np.diff(offsets), 1)
    total = np.concatenate([[0], np.cumsum(lengths)])
    letters = total[offsets[1:]] - total[offsets[:-1]]
    different = np.array([len(set(row)) for row in lists.to_pylist()])
    lines = count(r"(?m)^.+$")
    met = [
        (letters >= 3 * words) & (letters <= 10 * words),
        10 * count(r"[\pL\pM]") >= 7 * count(r"\S"),
        10 * count(r"#|\.\.\.|…") <= words,
        10 * different >= 3 * words,
        10 * count(r"(?m)^\s*[-*•]") < 3 * np.maximum(lines, 1),
    ]
    score = np.sum(met, axis=0) / len(met)
    return with_column(table, "quality_score", pa.array(score, pa.float64()))
