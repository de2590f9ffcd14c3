"""Parquet sources whose columns need no reader: they are scanned where they lie, not copied.

DuckDB knows the row numbers of a file. Rows that a reader would refuse are looked for first; if
there is one, the files are read as all others are.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from datakit.expressions import length_bucket
from datakit.ingest import schema
from datakit.sources import Input
from runspec.datarecipe import source_name
from runspec.prepared import ROW_BITS

_TEXTS = {"qa": ("question", "answer"), "text": (None, "text")}
TYPES = {"number": "float64", "whole": "int64", "flag": "boolean", "text": "string"}
_SPACES = "".join(chr(n) for n in range(0x3001) if chr(n).isspace())
# A query of more files than this would be slow to plan.
_MOST_FILES = 200


def scanned(
    con: Any, config: Mapping[str, Any], inputs: Sequence[Input], all_keep: Mapping[str, str]
) -> tuple[Any, dict[int, int]] | None:
    """Return the rows as a table over the files themselves, None if they need a reader.

    con: of DuckDB.

    Returns:
        The table, and its texts' lengths, which the same look at all rows tells.
    """
    import duckdb
    import pyarrow.parquet as pq

    from datakit.engines.duck import arrow

    sources = {source_name(each, n): each for n, each in enumerate(config["sources"])}
    if len(inputs) > _MOST_FILES:
        return None
    tables = []
    for each in inputs:
        source = sources[each.source]
        names = _TEXTS.get(source["format"])
        if each.type != "parquet" or names is None or source.get("max_rows") is not None:
            return None
        columns = dict(source.get("columns") or {})
        prompt, answer = (name and str(columns.get(name, name)) for name in names)
        there = pq.read_schema(each.file)
        wanted = [*filter(None, (prompt, answer)), *(source.get("keep") or {})]
        if any(name not in there.names for name in wanted):
            return None
        if any(
            str(there.field(name).type) not in ("string", "large_string")
            for name in filter(None, (prompt, answer))
        ):
            return None
        if not _kept_as_they_are(there, source.get("keep") or {}):
            return None
        tables.append(_table(con, each, prompt, answer, source, all_keep))
    whole = tables[0]
    for table in tables[1:]:
        whole = whole.union(table)
    formats = {source["format"] for source in sources.values()}
    if len(formats) > 1:
        return None
    bad = _blank(whole.answer)
    if formats == {"qa"}:
        bad = bad | _blank(whole.prompt)
    # All columns are looked at, so that a damaged page is found here.
    kept = {f"keep_{name}": whole[name] for name in all_keep}
    seen = whole.select(bucket=length_bucket(whole), bad=bad, **kept)
    most = {name: seen[name].max() for name in kept}
    figures = {"n": seen.count(), "bad": seen.bad.sum(), **most}
    try:
        rows = arrow(con, seen.group_by("bucket").agg(**figures))
    except duckdb.Error:
        # A damaged file, which a reader names.
        return None
    found = rows.to_pylist()
    if any(row["bad"] for row in found):
        return None
    return whole, {int(row["bucket"]): int(row["n"]) for row in found}


def _blank(text: Any) -> Any:
    """Whether a text is null or holds nothing but white space, as Python's strip sees it."""
    import ibis

    # Few texts begin with white space, and only of those more than one character is looked at.
    first = text.substr(0, 1)
    return ibis.cases(
        (text.isnull(), True),
        (first.isin(list(_SPACES)), ~text.re_search(f"[^{_SPACES}]")),
        else_=first == "",
    )


def _kept_as_they_are(there: Any, keep: Mapping[str, str]) -> bool:
    """Whether kept columns have the very types that they are kept as."""
    same = {"number": "double", "whole": "int64", "flag": "bool", "text": "string"}
    # An empty text counts as null for a reader, so texts are left to it.
    return all(
        str(there.field(name).type) == same[kind] and kind != "text" for name, kind in keep.items()
    )


def _table(
    con: Any,
    each: Input,
    prompt: str | None,
    answer: str | None,
    source: Mapping[str, Any],
    all_keep: Mapping[str, str],
) -> Any:
    import ibis

    file = con.read_parquet(each.file, file_row_number=True)
    fields = {
        "_id": file.file_row_number.cast("int64") + ((each.number << ROW_BITS) + 1),
        "source": ibis.literal(each.source),
        "prompt": file[prompt] if prompt else ibis.null("string"),
        "answer": file[answer],
        "messages": ibis.null("string"),
        "rejected": ibis.null("string"),
    }
    for name in schema(all_keep).names[6:]:
        kept = name in (source.get("keep") or {})
        fields[name] = file[name] if kept else ibis.null(TYPES[all_keep[name]])
    return file.select(**fields)
