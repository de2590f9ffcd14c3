"""The parts of a source: files, files of a table, or ranges of a query's rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Input:
    """One part of a source.

    number: its part of row ids. file: its path; for a query, its range. origin: the table, query or
    dataset to which it belongs. rows: their number if it is known without reading them. first: the
    number in its origin of its first row, if it is a copy. mtime_ns: 0 if nothing can change the
    part. blocks: one or more tasks of a reader, each with the arguments of openers.
    """

    source: str
    file: str
    type: str
    bytes: int = 0
    sha256: str = ""
    origin: str = ""
    rows: int | None = None
    first: int | None = None
    mtime_ns: int = 0
    blocks: tuple[Mapping[str, Any], ...] = ()
    number: int = 0

    def record(self) -> dict[str, Any]:
        """Return its entry in the lineage."""
        # blocks have tables' schemas and the address of a database.
        return {key: value for key, value in vars(self).items() if key != "blocks"}
