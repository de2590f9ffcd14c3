"""The interface of a query engine: tables as folders of Parquet shards, and tasks."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from plugins.data.errors import DataError
from plugins.data.progress import Progress
from plugins.data.query_engines.tasks import Task
from runspec import files, publish
from runspec.files import patient_json

DONE = "_done.json"


class QueryEngine:
    """Reads and writes tables as folders of Parquet shards, and runs tasks.

    threads: number of threads on this host. A folder is finished when it has its DONE file, with
    the number of rows.
    """

    name = ""

    def __init__(self, con: Any, threads: int) -> None:
        self.con, self.threads = con, threads
        self.progress = Progress()

    def versions(self) -> dict[str, str]:
        """The engine's version and what it runs on."""
        raise NotImplementedError

    def read(self, folder: Path) -> Any:
        """Return the table of a finished folder."""
        raise NotImplementedError

    def _copy(self, table: Any, folder: Path, partition: str | None) -> None:
        """Write a table's rows as Parquet files below a folder, which does not exist yet."""
        raise NotImplementedError

    def _share(self) -> float | None:
        """Return the finished share of the running query, 0 to 1; None if it is unknown."""
        raise NotImplementedError

    def _run(self, tasks: Sequence[Task]) -> list[str]:
        """Run tasks; return their faults."""
        raise NotImplementedError

    def run(self, tasks: Sequence[Task], name: str) -> None:
        """Run the tasks whose output does not exist; DataError with all faults.

        name: the part's name in the progress.
        """
        # A set has a folder for each split.
        folders = {Path(task.output).parent for task in tasks}
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        # If a task has no number of rows, all tasks count the same.
        known = all(task.rows is not None for task in tasks)
        weights = {Path(t.output): t.rows or 0 if known else 1 for t in tasks}
        total, seen = sum(weights.values()), set[Path]()

        def share() -> float:
            """Count the new outputs, each of which appears whole."""
            with suppress(OSError):  # of a shared filesystem: the next look counts them
                there = {path for folder in folders for path in folder.iterdir()}
                new = (weights.keys() & there) - seen
                seen.update(new)
                for _ in new:
                    self.progress.piece()
            return sum(weights[each] for each in seen) / total if total else 0.0

        first = share()
        if left := [task for task in tasks if Path(task.output) not in seen]:
            with self.progress.part(name, share, total if known else None, first):
                faults = self._run(left)
            if faults:
                raise DataError(*dict.fromkeys(faults))
            share()

    def map(
        self, source: Path, target: Path, name: str, function: str, options: Mapping[str, Any]
    ) -> None:
        """Run an Arrow function, 'module:name', on each shard of a finished folder.

        name: as of run.
        """
        tasks = [
            Task(
                "plugins.data.query_engines.tasks:map_shard",
                str(target / path.relative_to(source)),
                {"source": str(path), "function": function, "options": options},
                rows,
            )
            for path, rows in _shard_rows(source).items()
        ]
        self.run(tasks, name)

    def key(self, text: Any) -> Any:
        """Return a key of a text, for use within one query."""
        return text.hexdigest("md5")

    def one(self, expression: Any) -> dict[str, Any]:
        """Return the only row of a table of aggregates."""
        return self.rows(expression)[0]

    def rows(self, expression: Any) -> list[dict[str, Any]]:
        """Return the rows of a small table."""
        rows: list[dict[str, Any]] = self.con.to_pyarrow(expression).to_pylist()
        return rows

    def write(self, table: Any, folder: Path, split_by: str | None = None) -> int:
        """Write a table as shards, atomically, unless it is finished; return its rows.

        split_by: a text column: each of its values gets a folder of shards, without the column.
        """
        if (rows := finished(folder)) is not None:
            self.progress.piece()
            return rows
        with publish.folder(folder, "replace", flush=True) as temporary:
            written = temporary / ".written"
            with self.progress.part(folder.name, self._share):
                self._copy(table, written, split_by)
            for part in written.glob(f"{split_by}=*") if split_by else [written]:
                target = temporary / part.name.partition("=")[2]
                target.mkdir(exist_ok=True)
                for number, path in enumerate(shards(part)):
                    os.rename(path, target / f"part-{number:05d}.parquet")
            shutil.rmtree(written, ignore_errors=True)
            if not split_by and not shards(temporary):
                import pyarrow.parquet as pq

                empty = self.con.to_pyarrow(table.limit(0))
                pq.write_table(empty, temporary / "part-00000.parquet")
            count = mark(temporary)
        self.progress.piece()
        return count

    def close(self) -> None:
        """End the engine and its processes."""


def finished(folder: Path) -> int | None:
    """Return the number of rows of a finished folder, None if it is not finished."""
    content = patient_json(folder / DONE)
    return None if content is None else int(content["rows"])


def _shard_rows(folder: Path) -> dict[Path, int]:
    """Return the shards of a finished folder, in order, and the number of rows of each."""
    counts = (patient_json(folder / DONE) or {})["shards"]
    return {folder / name: int(counts[name]) for name in sorted(counts)}


def mark(folder: Path) -> int:
    """Count the rows of the shards and write the DONE file."""
    import pyarrow.parquet as pq

    counts = {str(p.relative_to(folder)): pq.read_metadata(p).num_rows for p in shards(folder)}
    text = json.dumps({"rows": sum(counts.values()), "shards": counts})
    files.write_text(folder / DONE, text)
    return sum(counts.values())


def shards(folder: Path) -> list[Path]:
    """Return the Parquet files below a folder, in order."""
    return sorted(folder.rglob("*.parquet"))
