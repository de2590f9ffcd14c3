"""The rows between two steps, and the operations of a step on them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from plugins.data.query_engines.base import QueryEngine, finished, mark


@dataclass(frozen=True)
class Rows:
    """Rows between two steps."""

    # An ibis table.
    table: Any
    # Their number.
    count: int
    # Their folder if they are in files.
    folder: Path | None = None

    def kept(self, table: Any, count: int) -> "Rows":
        """Return the remaining rows, or the same rows with more columns."""
        return replace(self, table=table, count=count, folder=None)


@dataclass
class Work:
    """The execution of one step."""

    engine: QueryEngine
    # Of the step: its finished tables are not computed again.
    folder: Path
    options: Mapping[str, Any]
    # The step's name in messages.
    where: str
    seed: int
    say: Callable[[str], None]
    # Figures for its record.
    notes: dict[str, Any] = field(default_factory=dict)

    def remember(self, name: str, table: Any) -> Any:
        """Write a table into the step's folder unless it exists, and return the written table."""
        self.engine.write(table, self.folder / name)
        return self.engine.read(self.folder / name)

    def rows_of(self, name: str) -> int:
        """Return the number of rows of a written table."""
        return finished(self.folder / name) or 0

    def without(self, rows: Rows, removed: Any) -> Rows:
        """Write the table of removed rows into the step's folder, and return the other rows."""
        left = rows.table.anti_join(self.remember("removed", removed), "_id")
        return rows.kept(left, rows.count - self.rows_of("removed"))

    def files(self, rows: Rows, name: str = "rows") -> Rows:
        """Return the rows as files, which are written if they do not exist."""
        if rows.folder is not None:
            return rows
        folder = self.folder / name
        self.engine.write(rows.table, folder)
        return replace(rows, table=self.engine.read(folder), folder=folder)

    def map(self, rows: Rows, name: str, function: str, options: Mapping[str, Any]) -> Rows:
        """Return the result of an Arrow function for the rows, with one task per shard.

        Args:
            function: 'module:name', called with a pyarrow Table and the options.
        """
        source, target = self.files(rows), self.folder / name
        assert source.folder is not None
        self.engine.map(source.folder, target, name, function, options)
        count = finished(target)
        count = mark(target) if count is None else count
        return Rows(self.engine.read(target), count, target)
