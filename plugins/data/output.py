"""Writes a training set atomically: rows by split, card and lineage."""

import hashlib
import json
import secrets
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from plugins.data.datarecipe import step_name
from plugins.data.errors import DataError
from plugins.data.expressions import length_of, text_of
from plugins.data.formats import turns_of
from plugins.data.pipeline import FORMAT, Prepared, versions
from plugins.data.query_engines.base import QueryEngine, finished, shards
from plugins.data.rows import Rows
from runspec import files, prepared, publish
from runspec.prepared import BAD_ROWS, CARD, CURRENT, DATA, LINEAGE, REMOVED

_ROWS = "plugins.data.output:final_rows"


def output_format(config: Mapping[str, Any]) -> str:
    """Return messages, text or preference: as requested, else by the sources' formats."""
    asked = (config.get("output") or {}).get("format")
    formats = {source["format"] for source in config["sources"]}
    if asked:
        if asked == "preference" and formats != {"preference"}:
            raise DataError(
                "output.format: preference needs sources of the format preference", exit_code=2
            )
        return str(asked)
    if formats == {"preference"}:
        return "preference"
    if "preference" in formats and len(formats) > 1:
        raise DataError(
            "sources of the format preference cannot be mixed with others: set "
            "output.format=messages to train on their chosen answers",
            exit_code=2,
        )
    return "text" if formats == {"text"} else "messages"


def write(
    config: Mapping[str, Any], made: Prepared, engine: QueryEngine, folder: Path, work: Path
) -> tuple[Path, dict[str, Any]]:
    """Write the version and make it the current one; return its folder and its card.

    folder: of all versions of the set.
    """
    form = output_format(config)
    rows = made.rows
    if "split" not in rows.table.columns:
        import ibis

        rows = rows.kept(rows.table.mutate(split=ibis.literal("train")), rows.count)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = publish.begin(folder / "new", alone=True)
    try:
        _write_rows(engine, rows, form, _are_pairs(config), temporary / DATA, work)
        splits = _splits(temporary, engine.threads)
        lost = rows.count - sum(each["rows"] for each in splits.values())
        if lost:
            raise DataError(f"{lost} rows were lost on the way to {folder}: report this")
        card = {
            "format": form,
            "created": time.time(),
            "rows": rows.count,
            "columns": _columns(temporary),
            "splits": splits,
            "content_sha256": files_hash(splits),
            "sources": sorted({each.source for each in made.inputs}),
            "description": config.get("description") or "",
        }
        lineage = _lineage(config, made, engine, str(card["content_sha256"]))
        _write_records(temporary, made, card, lineage)
        version = str(card["content_sha256"])[:16]
        return _publish(temporary, folder, version), card
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _lineage(
    config: Mapping[str, Any], made: Prepared, engine: QueryEngine, content_sha256: str
) -> dict[str, Any]:
    """Return what the rows were made of and by."""
    return {
        "format": FORMAT,
        "recipe": dict(config),
        "engine": engine.name,
        "versions": versions(engine),
        "inputs": [each.record() for each in made.inputs],
        "bad_rows": len(made.bad),
        "steps": made.records,
        "content_sha256": content_sha256,
    }


def _write_records(
    target: Path, made: Prepared, card: Mapping[str, Any], lineage: Mapping[str, Any]
) -> None:
    """Write the card, the lineage, the bad rows, and the ids of removed rows."""
    files.write_json(target / CARD, card)
    files.write_json(target / LINEAGE, lineage)
    text = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in made.bad)
    # Private: these records have not been masked.
    files.write_text(target / BAD_ROWS, text, mode=0o600)
    for key, folder in made.folders.items():
        if finished(folder / "removed"):
            shutil.copytree(folder / "removed", target / REMOVED / key)


def _publish(temporary: Path, folder: Path, version: str) -> Path:
    """Rename the folder to its version, and make it the current one atomically."""
    # The same rows, perhaps of another engine or recipe: the new record replaces the old one.
    publish.finish(temporary, folder / version, "replace", flush=True)
    publish.link(folder / CURRENT, version)
    files.fsync_path(folder)
    return folder / version


def _write_rows(
    engine: QueryEngine, rows: Rows, form: str, pairs: bool, target: Path, work: Path
) -> None:
    hidden = {"_id", "prompt", "answer", "messages", "rejected", "split"}
    extra = [name for name in rows.table.columns if name not in hidden]
    table = rows.table
    length = length_of(table).cast("int64")
    fields = {"id": table["_id"], "md5": _md5(table, extra), "characters": length}
    fields |= {**{name: table[name] for name in extra}, "split": table.split}
    if form == "text":
        engine.write(table.select(text=text_of(table), **fields), target, "split")
        return
    simple = {"n": 0, "p": 0} if pairs else _unlike_pairs(engine, table)
    if simple["p"] and form == "messages":
        raise DataError(
            f"output.format: {simple['p']:,} rows have no prompt, so that they are no "
            "conversation: set output.format=text, or a template with a prompt"
        )
    if form == "messages" and not simple["n"]:
        engine.write(table.select(messages=_conversation(table), **fields), target, "split")
        return
    stored = work / f"final-{secrets.token_hex(4)}"
    texts = table.select("prompt", "answer", "messages", "rejected", **fields)
    engine.write(texts, stored, "split")
    try:
        engine.map(stored, target, "messages", _ROWS, {"form": form})
    finally:
        shutil.rmtree(stored, ignore_errors=True)


def _are_pairs(config: Mapping[str, Any]) -> bool:
    """Whether all rows are known to be a prompt and an answer, so that no query is needed."""
    formats = {source["format"] for source in config["sources"]}
    return formats <= {"qa", "alpaca"} and "template" not in map(
        step_name, config.get("steps") or []
    )


def _unlike_pairs(engine: QueryEngine, table: Any) -> dict[str, Any]:
    """Return the number of rows with messages (n), and of rows without a prompt (p)."""
    return engine.one(table.agg(n=table.messages.notnull().sum(), p=table.prompt.isnull().sum()))


def _md5(table: Any, extra: list[str]) -> Any:
    """Return a hash of a row's content, without floats, which engines format differently."""
    import ibis

    names = ["messages", "rejected"]
    names += [name for name in sorted(extra) if not table[name].type().is_floating()]
    # The text's own hash is also that of a split without groups, and so computed once. The length
    # of the prompt gives its end in the text.
    ends = table.prompt.length().fill_null(-1)
    parts = [text_of(table).hexdigest("md5"), ends.cast("string")]
    parts += [table[name].cast("string").fill_null("\x00") for name in names]
    return ibis.literal("\x1f").join(parts).hexdigest("md5")


def _conversation(table: Any) -> Any:
    """Return the two messages of a row as an expression, which needs no Python per row."""
    import ibis

    user = ibis.struct({"role": ibis.literal("user"), "content": table.prompt})
    assistant = ibis.struct({"role": ibis.literal("assistant"), "content": table.answer})
    return ibis.array([user, assistant])


def final_rows(table: Any, form: str) -> Any:
    """Arrow function: return the rows in the format of the trainer."""
    import pyarrow as pa

    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    whole = [turns_of(row) for row in table.select(["prompt", "answer", "messages"]).to_pylist()]
    rest = table.drop_columns(["prompt", "answer", "messages", "rejected"])
    columns: dict[str, Any] = {"messages": whole}
    if form == "preference":
        worse = [
            [*turns[:-1], {"role": "assistant", "content": text or ""}]
            for turns, text in zip(whole, table["rejected"].to_pylist(), strict=True)
        ]
        columns = {"chosen": whole, "rejected": worse}
    made = {name: pa.array(values, pa.list_(message)) for name, values in columns.items()}
    return pa.table({**made, **{name: rest[name] for name in rest.column_names}})


def _splits(folder: Path, threads: int) -> dict[str, dict[str, Any]]:
    """Return rows and files of each split, and a hash of its rows that ignores their order."""

    def look(path: Path) -> tuple[int, dict[str, Any]]:
        count, part = content_hash(path)
        facts = path.stat()
        return part, {
            "file": str(path.relative_to(folder)),
            "bytes": facts.st_size,
            "mtime_ns": facts.st_mtime_ns,
            "sha256": files.sha256(path),
            "rows": count,
        }

    splits: dict[str, dict[str, Any]] = {}
    # Hashing releases the GIL, so threads run in parallel.
    with ThreadPoolExecutor(threads) as pool:
        for split in sorted(path for path in (folder / DATA).iterdir() if path.is_dir()):
            looks = list(pool.map(look, shards(split)))
            listed = [each for _, each in looks]
            rows, total = sum(each["rows"] for each in listed), sum(part for part, _ in looks)
            content = f"{total % 2**128:032x}"
            splits[split.name] = {"rows": rows, "content": content, "files": listed}
    return splits


def content_hash(path: Path) -> tuple[int, int]:
    """Return the number of rows of a Parquet file, and a hash of them that ignores their order.

    It is the sum of the rows' md5 as numbers of 128 bits, so that both engines give the same hash
    for the same rows, independent of the files.
    """
    import numpy as np
    import pyarrow.parquet as pq

    count = total = 0
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=65536, columns=["md5"]):
            column = batch.column(0)
            begin = 32 * column.offset
            digits = column.buffers()[2][begin : begin + 32 * len(column)].to_pybytes().decode()
            quarters = np.frombuffer(bytes.fromhex(digits), np.uint32).reshape(-1, 4)
            count += len(column)
            # A batch's sums of 32 bits each fit in 64, so that no carry is lost.
            for place, part in enumerate(quarters.sum(axis=0, dtype=np.uint64)):
                total += int(part) << 32 * place
    return count, total % 2**128


def files_hash(splits: Mapping[str, Mapping[str, Any]]) -> str:
    """Return one hash of all splits."""
    content = {name: [each["rows"], each["content"]] for name, each in splits.items()}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _columns(folder: Path) -> dict[str, str]:
    import pyarrow.parquet as pq

    first = shards(folder / DATA)
    return {field.name: str(field.type) for field in pq.read_schema(first[0])} if first else {}


def folder_of(root: Path, name: str) -> Path:
    """Return the folder of all versions of a set."""
    return root / prepared.FOLDER / name
