"""Parquet files whose columns need no reader: DuckDB scans them where they are, without a copy.

DuckDB provides the row numbers of a file. It first searches for rows that a reader would refuse; if
there is one, the files are read like all others.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

from plugins.data.datarecipe import source_name
from plugins.data.expressions import length_bucket
from plugins.data.formats import text_columns
from plugins.data.inputs import Input
from plugins.data.query_engines.base import QueryEngine
from runspec.prepared import ROW_BITS

TYPES = {"number": "float64", "whole": "int64", "flag": "boolean", "text": "string"}
_SPACES = "".join(chr(n) for n in range(0x3001) if chr(n).isspace())
# A query of more files than this would be slow to plan.
_MOST_FILES = 200


def scanned(
    engine: QueryEngine,
    config: Mapping[str, Any],
    inputs: Sequence[Input],
    all_keep: Mapping[str, str],
) -> tuple[Any, dict[int, int]] | None:
    """Return the rows as a table over the files themselves, None if they need a reader.

    engine: DuckDB.

    Returns:
        The table, and its texts' lengths, which the same query computes.
    """
    import duckdb

    sources = {source_name(each, n): each for n, each in enumerate(config["sources"])}
    texts = {tuple(text_columns(source)) for source in sources.values()}
    if len(texts) > 1 or len(inputs) > _MOST_FILES:
        return None
    try:
        tables = [_table(engine.con, each, sources[each.source], all_keep) for each in inputs]
        if any(table is None for table in tables):
            return None
        whole = reduce(lambda one, other: one.union(other), tables)
        bad = reduce(or_, (_blank(whole[name]) for name in texts.pop()))
        # All columns are read, so that a damaged page is detected here.
        kept = {f"keep_{name}": whole[name] for name in all_keep}
        seen = whole.select(bucket=length_bucket(whole), bad=bad, **kept)
        most = {name: seen[name].max() for name in kept}
        figures = {"n": seen.count(), "bad": seen.bad.sum(), **most}
        buckets = engine.rows(seen.group_by("bucket").agg(**figures))
    except duckdb.Error:
        # A damaged file: the reader's message names it.
        return None
    if any(row["bad"] for row in buckets):
        return None
    return whole, {int(row["bucket"]): int(row["n"]) for row in buckets}


def _blank(text: Any) -> Any:
    """Whether a text is null or only white space, as in Python's strip."""
    import ibis

    # Few texts begin with white space, and only those are searched further.
    first = text.substr(0, 1)
    return ibis.cases(
        (text.isnull(), True),
        (first.isin(list(_SPACES)), ~text.re_search(f"[^{_SPACES}]")),
        else_=first == "",
    )


def _table(con: Any, each: Input, source: Mapping[str, Any], all_keep: Mapping[str, str]) -> Any:
    """Return the rows of a file, None if a column is missing or needs a conversion."""
    import ibis

    texts, keep = text_columns(source), source.get("keep") or {}
    is_file = each.type == "parquet" and "layout" not in each.blocks[0]
    if not texts or not is_file or source.get("max_rows") is not None:
        return None
    file = con.read_parquet(each.file, file_row_number=True)
    types = {name: str(kind.copy(nullable=True)) for name, kind in file.schema().items()}
    kinds = {**dict.fromkeys(texts.values(), "text"), **keep}
    if any(types.get(name) != TYPES[kind] for name, kind in kinds.items()):
        return None
    fields = {
        "_id": file.file_row_number.cast("int64") + ((each.number << ROW_BITS) + 1),
        "source": ibis.literal(each.source),
    }
    for name in ("prompt", "answer", "messages", "rejected"):
        fields[name] = file[texts[name]] if name in texts else ibis.null("string")
    for name, kind in all_keep.items():
        fields[name] = file[name] if name in keep else ibis.null(TYPES[kind])
    return file.select(**fields)
