"""Data recipes on tiny files, prepared as cookbook prepare does it, and what came of them."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from plugins.data import pipeline
from plugins.data.query_engines.base import QueryEngine


def lines(path: Path, records: list[Any]) -> Path:
    """Write records as JSON lines; a text is written as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in records)
    path.write_text(text)
    return path


def qa(question: str, answer: str, **more: Any) -> dict[str, Any]:
    return {"question": question, "answer": answer, **more}


def chat(question: str, answer: str, system: str = "") -> list[dict[str, str]]:
    turns = (("system", system), ("user", question), ("assistant", answer))
    return [{"role": role, "content": text} for role, text in turns if text]


def run(
    folder: Path, steps: list[Any], on: QueryEngine, work: str = "work", **more: Any
) -> pipeline.Prepared:
    """Take the steps on the questions and answers in data.jsonl."""
    source = {"path": "data.jsonl", "format": "qa", **more.pop("source", {})}
    config = {"sources": [source], "steps": steps, **more}
    return pipeline.run(config, on, folder / work, folder, 1, lambda text: None)


def rows(made: pipeline.Prepared, on: QueryEngine) -> list[dict[str, Any]]:
    """The rows of a result in the order of their ids."""
    return on.rows(made.rows.table.order_by("_id"))


def answers(made: pipeline.Prepared, on: QueryEngine) -> list[str]:
    return [row["answer"] for row in rows(made, on)]


def ids(made: pipeline.Prepared, on: QueryEngine) -> set[int]:
    return {row["_id"] for row in rows(made, on)}


def written(folder: Path) -> list[dict[str, Any]]:
    """All rows below a folder of Parquet files, in the order of their ids."""
    found = [row for path in folder.rglob("*.parquet") for row in pq.read_table(path).to_pylist()]
    return sorted(found, key=lambda row: int(row["id"]))
