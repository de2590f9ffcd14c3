"""The language of a row."""

from functools import cache
from typing import Any

from plugins.data.errors import DataError
from plugins.data.rows import Rows, Work
from plugins.data.steps.filters import keep


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


# Arrow function ------------------------------------------------------------------------------


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
