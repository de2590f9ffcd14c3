"""Rows of a query: the ranges that are read concurrently, and the reader of one range."""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import pairwise
from typing import Any

from plugins.data.errors import DataError, first_line
from plugins.data.inputs import Input

_FETCHED_ROWS = 10_000
# One range is one task with one connection.
_RANGE_ROWS = 500_000
_MOST_RANGES = 256


def ranges(source: Mapping[str, Any], name: str, where: str, whole: bool) -> list[Input]:
    """Return the parts of a query's rows: one, or ranges of the column of partition_by.

    whole: do not ask for ranges, because only the first rows are read.

    Raises:
        DataError: the database does not answer.
    """
    query = _query(source)
    origin = f"{_shown(source)}: {query}"
    conditions: list[str | None] = [None]
    counted = None
    if (key := source.get("partition_by")) and not whole:
        with _connection(source, where) as con:
            cursor = con.raw_sql(
                f"SELECT COUNT(*), COUNT({key}), MIN({key}), MAX({key}) FROM ({query}) AS asked"
            )
            counted, given, low, high = cursor.fetchone()
        if counted == 0:
            raise DataError(f"{where}: the query returns no rows: {origin}")
        conditions = list(_conditions(str(key), counted, given, low, high, source, where))
    facts = [origin, counted, conditions]
    made = []
    for place, condition in enumerate(conditions):
        digest = hashlib.sha256(json.dumps([*facts, place]).encode()).hexdigest()
        # The address may name a variable, which is looked up where the rows are read.
        block = {"url": source["url"], "query": query, "where": condition, "of": counted}
        if counted is not None:
            # An estimate for the progress: the rows of a range are not counted.
            block["lines"] = counted // len(conditions)
        text = f"rows where {condition}" if condition else "all rows"
        made.append(Input(name, text, "sql", 0, digest, origin, blocks=(block,)))
    return made


def _conditions(
    key: str, count: int, given: int, low: Any, high: Any, source: Mapping[str, Any], where: str
) -> Iterator[str]:
    if given:
        try:
            begin, end = math.floor(low), math.floor(high) + 1
        except (TypeError, ValueError, OverflowError):
            raise DataError(
                f"{where}: partition_by: {key} is not a number but {type(low).__name__}: give a "
                "column of numbers, or leave it out"
            ) from None
        parts = int(source.get("partitions") or min(math.ceil(count / _RANGE_ROWS), _MOST_RANGES))
        parts = min(parts, end - begin)
        edges = [begin + (end - begin) * n // parts for n in range(parts + 1)]
        for first, end in pairwise(edges):
            yield f"{key} >= {first} AND {key} < {end}"
    if given < count:
        yield f"{key} IS NULL"


def rows(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a range of a query, without keeping all of them in memory.

    Raises:
        DataError: the database does not answer.
    """
    query = str(block["query"])
    if block["where"]:
        query = f"SELECT * FROM ({query}) AS asked WHERE {block['where']}"
    where = f"query at {_shown(block)}"
    with _connection(block, where) as con, _cursor(con, query) as cursor:
        names = None
        while fetched := cursor.fetchmany(_FETCHED_ROWS):
            # A server-side cursor has no columns before its first rows.
            names = names or [column[0] for column in cursor.description]
            for row in fetched:
                yield dict(zip(names, row, strict=True))


@contextmanager
def _cursor(con: Any, query: str) -> Iterator[Any]:
    if con.name != "postgres":
        with closing(con.raw_sql(query)) as cursor:
            yield cursor
        return
    # Without a name the driver would fetch all rows before it returns the first.
    with con.con.transaction(), con.con.cursor(name="cookbook") as cursor:
        cursor.execute(query)
        yield cursor


@contextmanager
def _connection(source: Mapping[str, Any], where: str) -> Iterator[Any]:
    """Connect as ibis does; an error of the database is one line without its password."""
    import ibis

    url = os.path.expandvars(str(source["url"]))
    con = None
    try:
        con = ibis.connect(url)
        yield con
    except ImportError as error:
        name = error.name or "for this database"
        raise DataError(
            f"{where}: the package {name} is missing: .venv/bin/pip install {name}"
        ) from None
    except DataError:
        raise
    except Exception as error:
        reason = first_line(error).replace(url, _shown(source))
        raise DataError(f"{where}: the database does not answer the query: {reason}") from None
    finally:
        if con is not None:
            con.disconnect()


def _query(source: Mapping[str, Any]) -> str:
    return str(source["query"]).strip().rstrip(";")


def _shown(source: Mapping[str, Any]) -> str:
    """Return the address of a database without the user and the password."""
    url = str(source["url"])
    return re.sub(r"(?i)((?:password|pwd|token|secret)=)[^&]*", r"\1***", url.rpartition("@")[2])
