"""Converts the log of requests to a data source: python -m serving.source FOLDER TARGET [options]

Writes Parquet with one row per answered request: request_id, time, model, messages (JSON, with the
answer), answer, feedback and label. Feedback is joined by the request's id from feedback.jsonl of
the endpoint: lines of {"request_id": ..., "feedback": ..., "label": ...}; a later line replaces an
earlier one, and a label replaces the answer in messages. A line with client_id instead of
request_id applies to all requests with this id of the client. With --delta the rows are merged into
the Delta table requests_delta of the target: new requests are added, new feedback replaces a row.
"""

import argparse
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from runspec import endpoint as endpoints
from runspec import files, since
from serving import journal

FEEDBACK = "feedback.jsonl"
TABLE = "requests_delta"
COLUMNS = ("request_id", "time", "model", "messages", "answer", "feedback", "label")


def rows_of(folder: Path, begin: float, feedback: Path | None = None) -> list[dict[str, Any]]:
    """Return the answered requests of an endpoint, with their feedback."""
    given = {
        (key, str(line[key])): line
        for line in files.read_json_lines(feedback or folder / FEEDBACK)
        if isinstance(line, dict)
        for key in ("request_id", "client_id")
        if key in line
    }
    rows = []
    for row in journal.read(folder / endpoints.REQUESTS, begin):
        if row["status"] != 200 or not row["answer"]:
            continue
        by_client = given.get(("client_id", str(row["client_id"])), {})
        known = given.get(("request_id", row["request_id"]), by_client)
        label = known.get("label")
        turns = json.loads(row["messages"])
        turns.append({"role": "assistant", "content": label or row["answer"]})
        rows.append(
            {
                **{key: row[key] for key in ("request_id", "time", "model", "answer")},
                "messages": json.dumps(turns, ensure_ascii=False),
                **{key: journal.as_text(known.get(key)) for key in ("feedback", "label")},
            }
        )
    return sorted(rows, key=lambda row: (row["time"], row["request_id"]))


def write(rows: list[dict[str, Any]], target: Path, delta: bool = False) -> Path:
    """Write rows to a folder: as Parquet or into a Delta table, and as JSON lines of messages."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    kinds = {name: pa.float64() if name == "time" else pa.string() for name in COLUMNS}
    columns = {name: pa.array([row[name] for row in rows], kinds[name]) for name in COLUMNS}
    file = target / (TABLE if delta else "requests.parquet")
    if delta:
        _merge(pa.table(columns), file)
    else:
        temporary = target / f".requests.{os.getpid()}.tmp"
        pq.write_table(pa.table(columns), temporary)
        os.replace(temporary, file)
    chats = [
        json.dumps({"messages": json.loads(row["messages"])}, ensure_ascii=False) for row in rows
    ]
    files.write_text(target / "messages.jsonl", "".join(f"{line}\n" for line in chats))
    return file


def _merge(rows: Any, folder: Path) -> None:
    """Merge rows into a Delta table by request_id; a row that is the same is not written again."""
    from deltalake import DeltaTable, write_deltalake

    if not DeltaTable.is_deltatable(str(folder)):
        write_deltalake(str(folder), rows)
        return
    changed = " OR ".join(
        f"coalesce(old.{name}, '') <> coalesce(new.{name}, '')" for name in ("feedback", "label")
    )
    merger = DeltaTable(str(folder)).merge(
        rows, "old.request_id = new.request_id", source_alias="new", target_alias="old"
    )
    merger.when_matched_update_all(changed).when_not_matched_insert_all().execute()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m serving.source", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--since", type=since.seconds, default=0.0)
    parser.add_argument("--feedback", type=Path)
    parser.add_argument("--delta", action="store_true")
    options = parser.parse_args()
    if options.feedback is not None and not options.feedback.is_file():
        print(f"error: --feedback: there is no file {options.feedback}", file=sys.stderr)
        return 2
    rows = rows_of(options.folder, options.since, options.feedback)
    if not rows:
        name = options.folder.name
        print(f"error: no answered request of {name} is logged in that time", file=sys.stderr)
        return 1
    if options.delta and not find_spec("deltalake"):
        print(
            "error: --delta: the package deltalake is missing: bash setup.sh --with tables",
            file=sys.stderr,
        )
        return 1
    file = write(rows, options.target, options.delta)
    judged = sum(row["feedback"] is not None or row["label"] is not None for row in rows)
    print(json.dumps({"rows": len(rows), "with_feedback": judged, "file": str(file)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
