"""DuckDB in this process, with limited memory; the rest is spilled to a disk of the node."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plugins.data.errors import DataError, first_line
from plugins.data.query_engines import spill, tasks
from plugins.data.query_engines.base import QueryEngine
from plugins.data.query_engines.tasks import Task

# About 0.4 million rows of chats: small enough to be one task of an Arrow function.
_SHARD_BYTES = 64 * 2**20
# Rows that a thread buffers before it writes them to the splits' files: with DuckDB's default of
# 524,288 the last write of 3 million rows took a quarter more CPU time and 1.6 times the memory.
# Row groups still have tens of thousands of rows.
_BUFFERED_ROWS = 30_000
# The memory of Python and its packages without DuckDB.
_PYTHON_BYTES = 384 * 2**20


class DuckDB(QueryEngine):
    """DuckDB through ibis.

    Args:
        memory: bytes that this process may use; DuckDB spills before that.
        temp_dir: an existing folder on a disk of this node; a folder of its own is made in it.
        threads: of DuckDB, and processes of Arrow functions.
    """

    name = "duckdb"

    def __init__(self, memory: int, temp_dir: Path, threads: int) -> None:
        import ibis

        self._spill = spill.make("duckdb", temp_dir)
        super().__init__(
            ibis.duckdb.connect(
                memory_limit=f"{max(memory - _PYTHON_BYTES, memory // 2) // 2**20}MiB",
                temp_directory=str(self._spill),
                threads=threads,
                # Rows have their ids; keeping their order would hold them in memory.
                preserve_insertion_order=False,
            ),
            threads,
        )

        # Progress is queried; no bar is printed into the results.
        self.con.raw_sql("SET enable_progress_bar = true")
        self.con.raw_sql("SET enable_progress_bar_print = false")
        self.con.raw_sql(f"SET partitioned_write_flush_threshold = {_BUFFERED_ROWS}")

    def versions(self) -> dict[str, str]:
        import duckdb

        return {"duckdb": duckdb.__version__}

    def read(self, folder: Path) -> Any:
        return self.con.read_parquet(f"{folder}/*.parquet")

    def _copy(self, table: Any, folder: Path, partition: str | None) -> None:
        import duckdb

        target = str(folder).replace("'", "''")
        how = f"PER_THREAD_OUTPUT, FILE_SIZE_BYTES {_SHARD_BYTES}"
        if partition:
            how = f"PARTITION_BY ({partition})"
        sql = f"COPY ({self.con.compile(table)}) TO '{target}' (FORMAT parquet, {how})"
        try:
            self.con.raw_sql(sql)
        except (duckdb.OutOfMemoryException, duckdb.IOException) as error:
            raise DataError(
                f"DuckDB: {first_line(error)}: set temp_dir= to a disk with more room (now "
                f"{self._spill.parent}), or memory= to more"
            ) from None

    def rows(self, expression: Any) -> list[dict[str, Any]]:
        # From DuckDB itself: ibis would import pandas, which is slow.
        table = self.con.con.sql(self.con.compile(expression)).to_arrow_table()
        rows: list[dict[str, Any]] = table.cast(expression.schema().to_pyarrow()).to_pylist()
        return rows

    def key(self, text: Any) -> Any:
        # A number has half the size of its digits, and is compared faster.
        return _md5_number()(text)

    def _share(self) -> float | None:
        percent = self.con.con.query_progress()
        return percent / 100 if percent >= 0 else None

    def _run(self, jobs: Sequence[Task]) -> list[str]:
        return tasks.run_here(jobs, self.threads)

    def close(self) -> None:
        self.con.disconnect()
        spill.remove(self._spill)


def _md5_number() -> Any:
    """DuckDB's md5 as a number of 128 bits, which ibis does not know."""
    import ibis

    def number(text: str) -> Any: ...

    signature = (("string",), "decimal(38, 0)")
    return ibis.udf.scalar.builtin(number, name="md5_number", signature=signature)
