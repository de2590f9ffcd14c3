"""Arrow functions over Parquet shards: one task per shard, whose output is written atomically.

DuckDB runs the tasks in processes of this host, Spark on its workers, with identical results. A
task whose output exists is skipped; the task of a killed process runs again.
"""

import importlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plugins.data.errors import DataError
from runspec import files

# Rows per call of an Arrow function: enough for numpy, with little memory.
BATCH_ROWS = 16384
_TRIES = 4


@dataclass(frozen=True)
class Task:
    """One output file."""

    # 'module:name', called with the file to write and the options.
    function: str
    output: str
    options: Mapping[str, Any] = field(default_factory=dict)
    # The number that it reads, if it is known.
    rows: int | None = None


def run(task: Task) -> list[str]:
    """Run a task unless its output exists; return its faults.

    A fault is returned and not raised, because an engine would wrap it in its own stack trace.
    """
    output = Path(task.output)
    if output.exists():
        return []
    try:
        with files.replacing(output) as temporary:
            _named(task.function)(temporary, **task.options)
    except DataError as error:
        return list(error.faults)
    except OSError as error:
        return [f"{output.parent}: {error.strerror or error}: check the disk, and run it again"]
    return []


def _named(function: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    named: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return named


def map_shard(target: Path, source: str, function: str, options: Mapping[str, Any]) -> None:
    """Write the results of an Arrow function for each batch of a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    make = _named(function)
    with pq.ParquetFile(source) as file:
        batches = file.iter_batches(batch_size=BATCH_ROWS)
        writer = None
        try:
            for batch in batches:
                # Spark reads its own schema from a file's metadata, which may be outdated.
                table = pa.Table.from_batches([batch]).replace_schema_metadata(None)
                made = make(table, **options)
                writer = writer or pq.ParquetWriter(target, made.schema)
                writer.write_table(made)
            if writer is None:
                empty = make(file.schema_arrow.remove_metadata().empty_table(), **options)
                writer = pq.ParquetWriter(target, empty.schema)
        finally:
            if writer is not None:
                writer.close()


def run_here(left: Sequence[Task], workers: int) -> list[str]:
    """Run tasks in processes of this host; return their faults.

    Raises:
        DataError: the worker of a task is killed again and again.
    """
    if len(left) == 1 or workers == 1:
        return [fault for task in left for fault in run(task)]
    faults: list[str] = []
    for _ in range(_TRIES):
        left = _round(left, workers, faults) if left else []
    if left:
        raise DataError(
            f"a worker was killed {_TRIES} times, last at {left[0].output}: it may lack memory; "
            "give it more, or set threads=1"
        )
    return faults


def _round(tasks: Sequence[Task], workers: int, faults: list[str]) -> list[Task]:
    """Run tasks; return the unfinished ones of killed workers."""
    # A fork would copy the engine's threads in an unknown state.
    context = multiprocessing.get_context("spawn")
    size = min(workers, len(tasks))
    with ProcessPoolExecutor(size, context, initializer=_end_with_parent) as pool:
        running = {pool.submit(run, task): task for task in tasks}
        left = []
        try:
            for future in as_completed(running):
                try:
                    faults += future.result()
                except BrokenProcessPool:
                    left.append(running[future])
        except BaseException:
            # A signal ends the run, which must not wait for its tasks.
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
            raise
    return left


def _end_with_parent() -> None:
    """End this worker when the run ends for any reason, since nothing else stops its task."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
