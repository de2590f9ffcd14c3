"""Decontamination: rows that share word n-grams with an evaluation set are removed.

As for GPT-3 (Brown et al. 2020, appendix C), with 13 words by default. An evaluation text of fewer
words counts as one n-gram: only the same text is removed.
"""

import json
from pathlib import Path
from typing import Any

from datakit import openers
from datakit.errors import DataError
from datakit.rows import Rows, Work
from datakit.sources import matches
from datakit.steps.filters import keep
from runspec.datarecipe import source_type

NGRAM = 13


def decontaminate(rows: Rows, work: Work) -> Rows:
    """Remove rows that share at least `min_hits` n-grams with the files `against`."""
    import numpy as np

    from datakit.text import shingles

    names = work.options["against"]
    names = [names] if isinstance(names, str) else list(names)
    ngram = int(work.options.get("ngram", NGRAM))
    found = [path for name in names for path in matches({"path": name}, work.base, work.where)]
    texts = [text for path in found for text in _texts(path, work.where)]
    if not texts:
        raise DataError(
            f"{work.where}.against: {', '.join(names)} holds no text: give evaluation sets"
        )
    import pyarrow as pa

    hashes, _ = shingles(pa.array(texts, pa.string()), ngram)
    work.folder.mkdir(parents=True, exist_ok=True)
    np.save(work.folder / "ngrams.npy", np.unique(hashes))
    work.notes["evaluation_texts"] = len(texts)
    options = {
        "known": str(work.folder / "ngrams.npy"),
        "ngram": ngram,
        "min_hits": int(work.options.get("min_hits", 1)),
    }
    made = work.map(rows, "marked", "datakit.steps.decontaminate:mark", options)
    kept = keep(made, work, ~made.table["_seen"])
    return kept.kept(kept.table.drop("_seen"), kept.count)


def _texts(path: Path, where: str) -> list[str]:
    """All texts of an evaluation set, whatever its columns: each text of a record is one."""
    kind = source_type({}, path)
    if kind == "parquet":
        import pyarrow.parquet as pq

        return [text for row in pq.read_table(path).to_pylist() for text in _strings(row)]
    raw = openers.whole({"file": str(path)}).decode("utf-8", errors="replace")
    if kind == "json":
        return _strings(json.loads(raw))
    if kind == "jsonl":
        found = []
        for number, line in enumerate(raw.splitlines(), 1):
            try:
                found += _strings(json.loads(line)) if line.strip() else []
            except ValueError as error:
                raise DataError(
                    f"{where}.against: {path}, line {number}: not JSON: {error}"
                ) from None
        return found
    return [line for line in raw.splitlines() if line.strip()]


def _strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [text for each in value for text in _strings(each)]
    # A single word, as a label or a role, would remove half of the rows.
    return [value] if isinstance(value, str) and len(value.split()) > 2 else []


# Arrow function ------------------------------------------------------------------------------


def mark(table: Any, known: str, ngram: int, min_hits: int) -> Any:
    """Return the rows with the column _seen: whether they share n-grams with the known ones."""
    import numpy as np
    import pyarrow as pa

    from datakit.text import shingles, texts

    hashes, starts = shingles(texts(table), ngram)
    hits = np.isin(hashes, np.load(known))
    total = np.concatenate([[0], np.cumsum(hits)])
    seen = total[starts[1:]] - total[starts[:-1]] >= min_hits
    return table.append_column("_seen", pa.array(seen, pa.bool_()))
