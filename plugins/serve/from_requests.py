"""Makes a data source of the log: python -m plugins.serve.from_requests FOLDER TARGET

Writes Parquet with one row per answered request: request_id, time, model, messages (JSON, with the
answer), answer, feedback and label. Feedback is joined by the request's id from feedback.jsonl of
the endpoint: lines of {"request_id": ..., "feedback": ..., "label": ...}; a later line replaces an
earlier one, and a label replaces the answer in messages. An answer whose feedback is not one of
APPROVED, and that has no label, is left out.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from plugins.serve import endpoint as endpoints
from plugins.serve import journal
from runspec import files, since

FEEDBACK = "feedback.jsonl"
# The words of feedback, in lower case, with which an answer may be trained on as it is.
APPROVED = {"up", "yes", "good", "like", "correct", "true", "positive", "1", "+1"}
COLUMNS = ("request_id", "time", "model", "messages", "answer", "feedback", "label")


class Feedback:
    """The lines of a file of feedback, and what they say of each request.

    unreadable: the numbers of the lines that have no request_id as a text, or whose label is no
    text. rejected: the answers that are left out, by their word of feedback.
    """

    def __init__(self, path: Path) -> None:
        self.unreadable: list[int] = []
        self.rejected: Counter[str] = Counter()
        self._lines: dict[int, str] = {}
        self._said: dict[str, dict[str, Any]] = {}
        self._found: set[str] = set()
        # Not splitlines: a text may hold other characters that it takes for ends of lines.
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        for number, text in enumerate(lines, 1):
            if not text.strip():
                continue
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                line = None
            told = line if isinstance(line, dict) else {}
            name = told.get("request_id")
            if not isinstance(name, str) or not isinstance(told.get("label"), str | None):
                self.unreadable.append(number)
                continue
            self._lines[number], self._said[name] = name, told

    def of(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return what is said of a logged request."""
        self._found.add(row["request_id"])
        return self._said.get(row["request_id"], {})

    @property
    def unmatched(self) -> list[int]:
        """The numbers of the lines whose request is not in the log."""
        return [number for number, name in self._lines.items() if name not in self._found]


def rows_of(folder: Path, begin: float, feedback: Feedback) -> list[dict[str, Any]]:
    """Return the answered requests of an endpoint since a time, with their feedback.

    Those that were rejected and have no label have None as messages: nobody may train on them.
    """
    rows = []
    # All of them, so that a line about an earlier request is not taken for a wrong id.
    for row in journal.read(folder / endpoints.REQUESTS):
        known = feedback.of(row)
        if row["status"] != 200 or not row["answer"] or (row["time"] or 0) < begin:
            continue
        label, word = known.get("label"), _as_text(known.get("feedback")).strip()
        turns = [*row["messages"], {"role": "assistant", "content": label or row["answer"]}]
        rejected = bool(word) and not label and word.lower() not in APPROVED
        if rejected:
            feedback.rejected[word] += 1
        rows.append(
            {
                **{key: row[key] for key in ("request_id", "time", "model", "answer")},
                "messages": None if rejected else json.dumps(turns, ensure_ascii=False),
                "feedback": word or None,
                "label": label,
            }
        )
    return sorted(rows, key=lambda row: (row["time"], row["request_id"]))


def _as_text(value: Any) -> str:
    """Return a text as it is, nothing for null, and another value as JSON."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def write(rows: list[dict[str, Any]], target: Path) -> Path:
    """Write rows to a folder, as Parquet and as JSON lines of messages."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = [row for row in rows if row["messages"] is not None]
    kinds = {name: pa.float64() if name == "time" else pa.string() for name in COLUMNS}
    file = target / "requests.parquet"
    with files.replacing(file) as temporary:
        pq.write_table(pa.Table.from_pylist(kept, pa.schema(kinds.items())), temporary)
    chats = [
        json.dumps({"messages": json.loads(row["messages"])}, ensure_ascii=False) for row in kept
    ]
    files.write_text(target / "messages.jsonl", "".join(f"{line}\n" for line in chats))
    return file


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m plugins.serve.from_requests", description=__doc__
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--since", type=since.seconds, default=0.0)
    parser.add_argument("--feedback", type=Path)
    options = parser.parse_args()
    path, name = options.feedback or options.folder / FEEDBACK, options.folder.name
    if options.feedback is not None and not path.is_file():
        sys.exit(f"error: --feedback: there is no file {path}")
    feedback = Feedback(path)
    rows = rows_of(options.folder, options.since, feedback)
    trained_on = sum(row["messages"] is not None for row in rows)
    if not rows:
        sys.exit(f"error: no answered request of {name} is logged in that time")
    if not trained_on:
        rejected = f"all {len(rows):,} answers of {name} were rejected and have no label"
        sys.exit(f"error: {rejected}: add labels to the lines of {path}")
    file = write(rows, options.target)
    answer = {
        "rows": trained_on,
        "with_feedback": sum(bool(row["feedback"] or row["label"]) for row in rows),
        "rejected": dict(feedback.rejected),
        "unmatched_lines": feedback.unmatched,
        "unreadable_lines": feedback.unreadable,
    }
    print(json.dumps({**answer, "feedback": str(path), "file": str(file)}))


if __name__ == "__main__":
    main()
