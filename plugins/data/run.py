"""Prepares a training set: python -m plugins.data.run SETTINGS.yaml

The settings have the recipe and the paths; cookbook prepare writes them.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from plugins.data import job
from plugins.data.datarecipe import memory_bytes
from plugins.data.errors import DataError
from plugins.data.query_engines import spill
from plugins.data.query_engines.base import QueryEngine
from runspec import files, lock, prepared

# With less free space than this, an engine that spills fails within seconds.
_LEAST_FREE = 256 * 2**20
_NEEDED = ("duckdb", "ibis", "phonenumbers", "py3langid", "pyarrow", "stdnum")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m plugins.data.run")
    parser.add_argument("settings", type=Path)
    parser.add_argument("--preview", type=int, metavar="ROWS")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--master", help="Address of a Spark master.")
    given = parser.parse_args()
    # Slurm ends a job with TERM: the engine is closed, and its folders are removed.
    signal.signal(signal.SIGTERM, job.stop)
    try:
        result = prepare(job.load(given.settings), given.preview, given.master)
    except DataError as error:
        logs = os.environ.get("LOGS")
        if logs and os.environ.get("RUN_DIR") and Path(logs).is_dir():
            job.leave_fault(error, Path(logs), 0)
        for fault in error.faults:
            print(f"error: {fault}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted: the same command continues from here", file=sys.stderr)
        sys.exit(130)
    print(json.dumps(result) if given.json else "\n".join(_lines(result)))


def prepare(
    settings: Mapping[str, Any], preview: int | None = None, master: str | None = None
) -> dict[str, Any]:
    """Prepare a set, or a preview of its first rows.

    Args:
        settings: name, recipe, engine, base (of relative paths) and root (the datasets folder).

    Returns:
        The result: folder, card, and a record of each step.
    """
    if missing := [name for name in _NEEDED if not find_spec(name)]:
        raise DataError(f"missing: {', '.join(missing)}: install with: bash setup.sh --with data")
    from plugins.data import output, pipeline
    from plugins.data.progress import Progress

    config, root = settings["recipe"], Path(settings["root"])
    name, base = str(settings["name"]), Path(settings["base"])
    folder = output.folder_of(root, name)
    output.output_format(config)
    threads = int(config.get("threads") or len(os.sched_getaffinity(0)))
    if preview is not None:
        return _previewed(settings, threads, master, preview)
    began = time.monotonic()
    with _alone(folder):
        work_folder = folder / ".work"
        work_folder.mkdir(parents=True, exist_ok=True)
        # Private: it has the rows before personal data is masked.
        work_folder.chmod(0o700)
        progress = Progress(len(config.get("steps") or []) + 2, say)
        engine = _engine(settings, threads, master)
        engine.progress = progress
        try:
            made = pipeline.run(config, engine, work_folder, base, threads, say)
            progress.begin("write", made.rows.count)
            target, card = output.write(config, made, engine, folder, work_folder)
            progress.step()
        finally:
            engine.close()
        progress.write("finished")
        # The set is complete: intermediate rows are not needed.
        if not settings.get("keep_work"):
            shutil.rmtree(work_folder, ignore_errors=True)
    splits = {split: each["rows"] for split, each in card["splits"].items()}
    return {
        "name": name,
        "folder": str(target),
        "rows": card["rows"],
        "splits": splits,
        "content_sha256": card["content_sha256"],
        "steps": made.records,
        "bad_rows": len(made.bad),
        "seconds": round(time.monotonic() - began, 2),
    }


def _previewed(
    settings: Mapping[str, Any], threads: int, master: str | None, most: int
) -> dict[str, Any]:
    """Return what the steps make of the first rows of each source; nothing is written."""
    from plugins.data import pipeline

    began, config = time.monotonic(), settings["recipe"]
    base = Path(settings["base"])
    with ExitStack() as stack:
        work = spill.make("preview", spill.parent_of(config.get("temp_dir")))
        stack.callback(spill.remove, work)
        engine = _engine(settings, threads, master)
        stack.callback(engine.close)
        made = pipeline.run(config, engine, work, base, threads, say, most)
        rows = engine.rows(made.rows.table.order_by("_id").limit(3))
    return {
        "name": str(settings["name"]),
        "preview": most,
        "rows": made.rows.count,
        "steps": made.records,
        "bad": made.bad[:5],
        "samples": [{k: v for k, v in row.items() if v is not None} for row in rows],
        "seconds": round(time.monotonic() - began, 2),
    }


def say(text: str) -> None:
    """Print progress."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock a name for one run at a time; the kernel releases the lock when the run ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = lock.take(folder / files.LOCK)
    except lock.Held as held:
        raise DataError(
            f"another run ({held}) prepares {folder.name}: wait for it, or give this one another "
            "name with --name"
        ) from None
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written to or locked ({error.strerror}): set COOKBOOK_ROOT"
        ) from None
    with file:
        yield


def _engine(settings: Mapping[str, Any], threads: int, master: str | None) -> QueryEngine:
    config = settings["recipe"]
    folder = spill.parent_of(config.get("temp_dir"))
    facts = os.statvfs(folder)
    if facts.f_bavail * facts.f_frsize < _LEAST_FREE:
        raise DataError(
            f"temp_dir: {folder} has {facts.f_bavail * facts.f_frsize // 2**20} MiB free, and the "
            "engine spills there what memory does not hold: set temp_dir= to a disk with room"
        )
    memory = memory_bytes(config.get("memory") or "0") or job.memory_bytes() // 2
    if settings.get("engine") == "spark":
        from plugins.data.query_engines.spark import Spark

        return Spark(memory, folder, threads, master, settings.get("event_log"))
    from plugins.data.query_engines.duck import DuckDB

    return DuckDB(memory, folder, threads)


def _lines(made: Mapping[str, Any]) -> Iterator[str]:
    if "preview" in made:
        yield f"preview of the first {made['preview']:,} rows of each source, {made['seconds']} s"
        for bad in made["bad"]:
            yield f"  bad row: {bad['file']}, line {bad['line']}: {bad['reason']}"
        for step in made["steps"]:
            yield f"{step['step']}: {step['rows_in']:,} -> {step['rows_out']:,} rows"
            for sample in step["samples"][:3]:
                yield f"  removed  {sample['text'][:140]!r}"
                if "kept" in sample:
                    yield f"     kept  {sample['kept'][:140]!r}"
            for change in step["changed"][:2]:
                yield f"  before   {change['before'][:140]!r}"
                yield f"  after    {change['after'][:140]!r}"
        for row in made["samples"]:
            shown = {key: value for key, value in row.items() if key != "messages"}
            yield f"  kept     {json.dumps(shown, ensure_ascii=False, default=str)[:300]}"
        return
    splits = ", ".join(f"{split} {rows:,}" for split, rows in made["splits"].items())
    yield f"prepared {made['name']}: {made['rows']:,} rows ({splits}) in {made['seconds']} s"
    yield f"  folder     {made['folder']}"
    if made["bad_rows"]:
        yield f"  bad rows   {made['bad_rows']:,}, in {made['folder']}/{prepared.BAD_ROWS}"
    first = "train" if "train" in made["splits"] else next(iter(made["splits"]))
    yield f"  train on it: cookbook submit --recipe RECIPE dataset=prepared:{made['name']}@{first}"


if __name__ == "__main__":
    main()
