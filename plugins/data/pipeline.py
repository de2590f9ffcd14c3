"""Runs a data recipe: reads the sources and runs the steps; finished steps are skipped.

Each step has a folder whose name is a hash of everything that its rows depend on: the inputs and
the recipe up to the step. An interrupted run finds its finished folders again.
"""

import hashlib
import importlib.metadata
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from plugins.data import sources
from plugins.data.datarecipe import STEPS, step_name, step_options
from plugins.data.errors import DataError
from plugins.data.ingest import BAD_SUFFIX
from plugins.data.inputs import Input
from plugins.data.query_engines.base import QueryEngine, finished, mark, shards
from plugins.data.recognisers import hidden
from plugins.data.rows import Rows, Work
from plugins.data.steps import columns
from runspec import files
from runspec.files import patient_json

# Incremented when the same recipe may give other rows, or another hash of them.
FORMAT = 5
SAMPLES = 5
_RECORD = "_step.json"
_BAD_SHARE = 0.01
# Characters of a sample that a record shows.
_SHORT = 240
_PACKAGES = ["ibis-framework", "pyarrow", "numpy", "xxhash", "jinja2", "tokenizers", "py3langid"]
_PACKAGES += ["phonenumberslite", "python-stdnum"]


@dataclass
class Prepared:
    """The result of a recipe."""

    rows: Rows
    inputs: list[Input]
    # Of each step.
    records: list[dict[str, Any]]
    # The records that could not be read.
    bad: list[dict[str, Any]]
    # Of each step, whose tables lie there.
    folders: dict[str, Path] = field(default_factory=dict)


def run(
    config: Mapping[str, Any],
    engine: QueryEngine,
    work: Path,
    base: Path,
    threads: int,
    say: Callable[[str], None],
    limit: int | None = None,
) -> Prepared:
    """Read the sources and run all steps.

    Args:
        work: folder for intermediate rows.
        base: the base folder of relative paths.
        limit: maximum number of rows of each source.

    Raises:
        DataError: a source or a step has a fault, or too many rows have one.
    """
    all_keep = _all_keep(config)
    columns.check(config, all_keep)
    inputs = sources.find(config, base, work / "sources", threads, say, limit)
    first = _fingerprint(FORMAT, [each.sha256 for each in inputs], config["sources"], limit)
    rows, bad = _ingest(config, engine, work / f"00-read-{first}", inputs, all_keep, limit, say)
    records, folders = [], {}
    engine.progress.step()
    print_, seed = first, int(config.get("seed") or 0)
    for number, step in enumerate(config.get("steps") or [], 1):
        name, options = step_name(step), step_options(step)
        if options.get("tokenizer"):
            options["tokenizer"] = str(base / os.path.expanduser(str(options["tokenizer"])))
        print_ = _fingerprint(print_, name, options, _used_files(options), seed)
        key, where = f"{number:02d}-{name}", f"steps.{number - 1}.{name}"
        folder = folders[key] = work / f"{key}-{print_}"
        here = Work(engine, folder, options, where, seed, say)
        rows, record = _step(key, name, rows, here)
        records.append(record)
    return Prepared(rows, inputs, records, bad, folders)


def _step(key: str, name: str, before: Rows, here: Work) -> tuple[Rows, dict[str, Any]]:
    """Run a step; return its rows and its record, which is kept with its tables.

    Raises:
        DataError: the step has a fault, or leaves no rows.
    """
    engine, began = here.engine, time.monotonic()
    known = patient_json(here.folder / _RECORD)
    engine.progress.begin(key, before.count)
    module, _, function = STEPS[name].function.partition(":")
    rows = getattr(import_module(f"plugins.data.steps.{module}"), function)(before, here)
    if known is None:
        known = {
            "step": key,
            "options": here.options,
            "rows_in": before.count,
            "rows_out": rows.count,
            "seconds": round(time.monotonic() - began, 2),
            "notes": here.notes,
            "samples": _samples(engine, here.folder, before),
            "changed": _changed(engine, before, rows, name),
        }
        here.folder.mkdir(parents=True, exist_ok=True)
        files.write_json(here.folder / _RECORD, known)
    removed = before.count - rows.count
    engine.progress.step()
    here.say(
        f"{key:24} {before.count:>12,} -> {rows.count:>12,} rows  ({removed:,} removed, "
        f"{known['seconds']:.1f} s)"
    )
    if rows.count == 0:
        raise DataError(
            f"{here.where}: no rows are left; the step removed {removed:,}, for example "
            f"{_shown(known['samples'])}: change its options"
        )
    return rows, known


def _all_keep(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the kept columns of all sources and their types, which must agree."""
    kinds: dict[str, str] = {}
    faults = []
    for source in config["sources"]:
        for name, kind in (source.get("keep") or {}).items():
            if kinds.setdefault(name, kind) != kind:
                faults.append(
                    f"keep: {name!r} is {kinds[name]} in one source and {kind} in another"
                )
    if faults:
        raise DataError(*faults, exit_code=2)
    return kinds


def _ingest(
    config: Mapping[str, Any],
    engine: QueryEngine,
    folder: Path,
    inputs: list[Input],
    all_keep: Mapping[str, str],
    limit: int | None,
    say: Callable[[str], None],
) -> tuple[Rows, list[dict[str, Any]]]:
    if finished(folder) is None:
        tasks = sources.tasks(config, inputs, folder, all_keep, limit)
        folder.mkdir(parents=True, exist_ok=True)
        engine.progress.begin("00-read")
        engine.run(tasks, "rows")
        # If a source changed while it was read, the shards are not valid.
        try:
            sources.unchanged(inputs)
        except DataError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        mark(folder)
    else:
        for _ in shards(folder):
            engine.progress.piece()
    count = finished(folder) or 0
    bad = [
        each
        for path in sorted(folder.glob(f"*{BAD_SUFFIX}"))
        for each in files.read_json_lines(path)
    ]
    share = float(config.get("max_bad_share", _BAD_SHARE))
    if bad:
        say(f"{len(bad):,} of {count + len(bad):,} rows cannot be read, first: {_place(bad[0])}")
    if len(bad) > share * (count + len(bad)):
        reasons: dict[str, dict[str, Any]] = {}
        for each in bad:
            reasons.setdefault(f"{each['source']} {each['reason'][:40]}", each)
        shown = list(reasons.values())[:5]
        raise DataError(
            f"{len(bad):,} of {count + len(bad):,} rows cannot be read, which is more than "
            f"max_bad_share={share:g}: fix the rows, columns= of the source, or set max_bad_share",
            *(_place(each) for each in shown),
        )
    if count == 0:
        raise DataError("the sources have no rows: check path and format of each source")
    say(f"{'00-read':24} {'':>12}    {count:>12,} rows of {len(inputs)} files  ({len(bad):,} bad)")
    return Rows(engine.read(folder), count, folder), bad


def _place(bad: Mapping[str, Any]) -> str:
    return f"{bad['file']}, line {bad['line']}: {bad['reason']}"


def _used_files(options: Mapping[str, Any]) -> list[str]:
    """Return the hashes of the files of a step's tokenizer."""
    if not options.get("tokenizer"):
        return []
    folder = Path(str(options["tokenizer"]))
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    return [files.sha256(folder / name) for name in names if (folder / name).is_file()]


def _fingerprint(*parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _samples(engine: QueryEngine, folder: Path, before: Rows) -> list[dict[str, Any]]:
    """Return the first rows that a step removed, as they were before it."""
    if not finished(folder / "removed"):
        return []
    removed = engine.read(folder / "removed")
    chosen = engine.rows(removed.order_by("_id").limit(SAMPLES))
    by_id = {row["_id"]: row for row in chosen}
    ids = list(by_id)
    kept = [row["kept_id"] for row in chosen if "kept_id" in row]
    # One query, because it may read all rows of the sources.
    table, wanted = before.table, [*ids, *kept]
    # With the range an engine can skip files.
    near = table["_id"].between(min(wanted), max(wanted))
    both = engine.rows(table.filter(near & table["_id"].isin(wanted)))
    before_removal = [row for row in both if row["_id"] in by_id]
    if kept:
        texts = {row["_id"]: _short(row) for row in both}
        for row in chosen:
            row["kept"] = texts.get(row.get("kept_id"), "")
    extra = ("_id", "messages", "rejected", "prompt", "answer")
    return [
        {**_short_row(row, extra), **{k: v for k, v in by_id[row["_id"]].items() if k != "_id"}}
        for row in sorted(before_removal, key=lambda row: int(row["_id"]))
    ]


def _changed(engine: QueryEngine, before: Rows, after: Rows, name: str) -> list[dict[str, Any]]:
    """Return the first rows whose text a step has changed, before and after it."""
    if not STEPS[name].changes_texts:
        return []
    old = before.table.select("_id", _prompt="prompt", _answer="answer")
    both = after.table.inner_join(old, "_id")
    prompt = both.prompt.fill_null("") != both["_prompt"].fill_null("")
    rows = both.filter(prompt | (both.answer != both["_answer"])).order_by("_id").limit(3)
    return [
        {
            "id": row["_id"],
            "before": _short({"prompt": row["_prompt"], "answer": row["_answer"]}),
            "after": _short(row),
        }
        for row in engine.rows(rows)
    ]


def _short_row(row: Mapping[str, Any], without: tuple[str, ...]) -> dict[str, Any]:
    rest = {
        key: hidden(value) if isinstance(value, str) else value
        for key, value in row.items()
        if key not in without and value is not None
    }
    return {"id": row["_id"], "text": _short(row), **rest}


def _short(row: Mapping[str, Any]) -> str:
    # Hidden first: a value that is cut in two would not be recognised.
    text = hidden("\n".join(part for part in (row.get("prompt"), row.get("answer")) if part))
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}..."


def _shown(samples: list[dict[str, Any]]) -> str:
    return repr(samples[0]["text"][:80]) if samples else "none"


def versions(engine: QueryEngine) -> dict[str, str]:
    """Return the versions of the engine and of the packages that made the rows."""
    packages = engine.versions()
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return packages
