"""Writes the test split as samples of the suite, and questions: python samples.py VERSION FOLDER

VERSION is the folder of a prepared set. FOLDER gets support-test.jsonl (messages and intent) and
support-questions.jsonl, the prompts of 200 of them.
"""

import json
import sys
from pathlib import Path

import pyarrow.dataset as ds

QUESTIONS = 200


def main() -> None:
    """Write both files, in an order that does not depend on the backend that prepared the set."""
    version, folder = Path(sys.argv[1]), Path(sys.argv[2])
    table = ds.dataset(version / "data" / "test", format="parquet").to_table()
    rows = sorted(table.to_pylist(), key=lambda row: row["md5"])
    samples = [{"messages": row["messages"], "intent": row["intent"]} for row in rows]
    questions = [{"messages": each["messages"][:-1]} for each in samples[:QUESTIONS]]
    for name, part in (("test", samples), ("questions", questions)):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"support-{name}.jsonl").write_text(text, encoding="utf-8")


main()
