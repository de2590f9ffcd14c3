"""Parquet sources whose columns need no reader: they are scanned in place instead of copied.

DuckDB provides the row numbers of a file. It first searches for rows that a reader would refuse; if
there is one, the files are read like all others.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from datakit.expressions import length_bucket
from datakit.ingest import schema
from datakit.inputs import Input
from runspec.datarecipe import source_name
from runspec.prepared import ROW_BITS

_TEXTS = {"qa": ("question", "answer"), "text": (None, "text")}
TYPES = {"number": "float64", "whole": "int64", "flag": "boolean", "text": "string"}
# Their types in Arrow.
_ARROW = {"number": "double", "whole": "int64", "flag": "bool", "text": "string"}
_SPACES = "".join(chr(n) for n in range(0x3001) if chr(n).isspace())
# A query of more files than this would be slow to plan.
_MOST_FILES = 200


def scanned(
    con: Any, config: Mapping[str, Any], inputs: Sequence[Input], all_keep: Mapping[str, str]
) -> tuple[Any, dict[int, int]] | None:
    """Return the rows as a table over the files themselves, None if they need a reader.

    con: DuckDB's connection.

    Returns:
        The table, and its texts' lengths, which the same query computes.
    """
    import duckdb

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
        prompt = names[0] and str(columns.get(names[0], names[0]))
        answer = str(columns.get(names[1], names[1]))
        wanted = [*filter(None, (prompt, answer)), *(source.get("keep") or {})]
        places = _places(each, wanted)
        if places is None or not _as_they_are(places, prompt, answer, source.get("keep") or {}):
            return None
        tables.append(_table(con, each, prompt, answer, source, all_keep, places))
    whole = tables[0]
    for table in tables[1:]:
        whole = whole.union(table)
    formats = {source["format"] for source in sources.values()}
    if len(formats) > 1:
        return None
    bad = _blank(whole.answer)
    if formats == {"qa"}:
        bad = bad | _blank(whole.prompt)
    # All columns are read, so that a damaged page is detected here.
    kept = {f"keep_{name}": whole[name] for name in all_keep}
    seen = whole.select(bucket=length_bucket(whole), bad=bad, **kept)
    most = {name: seen[name].max() for name in kept}
    figures = {"n": seen.count(), "bad": seen.bad.sum(), **most}
    try:
        rows = arrow(con, seen.group_by("bucket").agg(**figures))
    except duckdb.Error:
        # A damaged file: the reader's message names it.
        return None
    buckets = rows.to_pylist()
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


def _places(each: Input, wanted: Sequence[str]) -> dict[str, tuple[str | None, Any]] | None:
    """Return {column: (the file's name of it, its type)}, None if only a reader can find them.

    A name is None if the value is a constant of the whole file.
    """
    import pyarrow as pa

    from datakit.parquet import opened

    layout = each.blocks[0].get("layout")
    if "://" in each.file or (layout is not None and layout.kept is not None):
        return None
    try:
        with opened(each.file) as file:
            there = file.schema_arrow
    except (OSError, pa.ArrowInvalid):
        # The reader's message gives the fault.
        return None
    names = dict.fromkeys(there.names) if layout is None else layout.columns(there)
    places: dict[str, tuple[str | None, Any]] = {}
    for name in wanted:
        if name in names:
            place = names[name] or name
            kind = there.field(place).type
            if layout is not None and layout.schema.field(name).type != kind:
                return None
            places[name] = (place, kind)
        elif layout is not None and name in layout.schema.names:
            places[name] = (None, layout.schema.field(name).type)
        else:
            return None
    return places


def _as_they_are(
    places: Mapping[str, tuple[str | None, Any]],
    prompt: str | None,
    answer: str,
    keep: Mapping[str, str],
) -> bool:
    """Whether all columns have exactly the types of the kit's rows."""
    texts = [name for name in (prompt, answer) if name]
    # For a column that is in no file the reader has rules.
    if any(places[name][0] is None for name in texts):
        return False
    kinds = {**dict.fromkeys(texts, "text"), **keep}
    types = {name: str(places[name][1]).removeprefix("large_") for name in kinds}
    return all(types[name] == _ARROW[kind] for name, kind in kinds.items())


def _table(
    con: Any,
    each: Input,
    prompt: str | None,
    answer: str,
    source: Mapping[str, Any],
    all_keep: Mapping[str, str],
    places: Mapping[str, tuple[str | None, Any]],
) -> Any:
    import ibis

    layout = each.blocks[0].get("layout")
    file = con.read_parquet(each.file, file_row_number=True)
    fields = {
        "_id": file.file_row_number.cast("int64") + ((each.number << ROW_BITS) + 1),
        "source": ibis.literal(each.source),
        "prompt": file[places[prompt][0]] if prompt else ibis.null("string"),
        "answer": file[places[answer][0]],
        "messages": ibis.null("string"),
        "rejected": ibis.null("string"),
    }
    for name in schema(all_keep).names[6:]:
        kind = TYPES[all_keep[name]]
        if name not in (source.get("keep") or {}):
            fields[name] = ibis.null(kind)
        elif (place := places[name][0]) is not None:
            fields[name] = file[place]
        else:
            constants = layout.constants if layout is not None else {}
            fields[name] = ibis.literal(constants.get(name), kind)
    return file.select(**fields)
