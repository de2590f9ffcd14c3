"""The files of a source."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Input:
    """One file of a source."""

    source: str
    # Its path.
    file: str
    type: str
    bytes: int = 0
    sha256: str = ""
    # The table, query or dataset of which it is a copy.
    origin: str = ""
    # Their number if it is known without reading them.
    rows: int | None = None
    # The number in its origin of its first row, if it is a copy.
    first: int | None = None
    mtime_ns: int = 0
    # One or more tasks of a reader, each with the arguments of openers.
    blocks: tuple[Mapping[str, Any], ...] = ()
    # Its part of row ids.
    number: int = 0

    def record(self) -> dict[str, Any]:
        """Return its entry in the lineage."""
        return {key: value for key, value in vars(self).items() if key != "blocks"}
