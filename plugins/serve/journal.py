"""The log of requests: a journal that survives a kill, and Parquet files made from it.

A request is written to the journal when it is accepted, and its answer when it is sent. A line is
one write to a file opened for appending, so that a killed process loses no accepted request.
Journals become Parquet: those of running processes at intervals, those of ended processes when the
next one starts or reads the log. A disk that is full costs lines of the log, and no answer.
"""

import errno
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from runspec import lock
from runspec.files import parse_json, replacing

# Removed from all texts: mail addresses, phone numbers, keys.
REDACTED = (
    r"[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}",
    r"(?<!\w)\+?\d[\d ()/-]{7,}\d(?!\w)",
    r"\b(?:sk|hf|ghp|xox[abp])[-_][A-Za-z0-9_-]{16,}",
)
# The columns of the log, with their Arrow types.
COLUMNS = {"request_id": "string", "time": "double"}
COLUMNS |= dict.fromkeys(("endpoint", "model", "messages", "answer", "answers"), "string")
COLUMNS |= {"status": "int64", "stream": "bool", "latency_s": "double", "first_token_s": "double"}
COLUMNS |= {"prompt_tokens": "int64", "answer_tokens": "int64", "parameters": "string"}
# What people write; an id is not redacted, even if it has the digits of a phone number.
_TEXTS = {"messages", "answer", "answers", "parameters"}


class Journal:
    """One process's log of requests under a folder.

    unlogged: how many lines could not be written. fault: why the last one could not, None if it is
    written.
    """

    def __init__(self, folder: Path, redact: Iterable[str] = ()) -> None:
        self.folder = folder
        self._patterns = [re.compile(each) for each in (*REDACTED, *redact)]
        self._open: dict[str, dict[str, Any]] = {}
        self._file: int | None = None
        self._torn = False
        self.path, self.since, self.rows = folder, time.time(), 0
        self.unlogged = 0
        self.fault: OSError | None = None
        recover(folder)
        # Others see from now on that there is a log.
        try:
            self._begin()
        except OSError as error:
            self.fault = error

    def _begin(self) -> int:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark = f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"
        path = self.folder / f"journal-{mark}.jsonl"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
        file = os.open(path, flags, 0o600)
        # The kernel releases the lock when the process ends: then other processes may read it.
        lock.try_open(file)
        self.path, self._file, self._torn = path, file, False
        self.since, self.rows = time.time(), 0
        return file

    def accepted(self, row: Mapping[str, Any]) -> bool:
        """Write a request before it is answered; return whether it is in the log."""
        line = self._clean(row)
        written = self._write({"accepted": line})
        if written:
            self._open[line["request_id"]] = line
        return written

    def answered(self, request_id: str, answer: Mapping[str, Any]) -> None:
        """Write the outcome of a request that is in the log."""
        if self._open.pop(request_id, None) is None:
            return
        line = {"request_id": request_id, **self._clean(answer)}
        self.rows += self._write({"answered": line})

    def switch(self) -> None:
        """Begin a new journal if this one has an answer; recover converts the one before.

        It must not run concurrently with accepted and answered; recover may.

        Raises:
            OSError: no new one can be made; the one before goes on.
        """
        if not self.rows or self._file is None:
            return
        before = self._file
        self._begin()
        # Those that are still being answered go into the new journal, too.
        for line in self._open.values():
            self._write({"accepted": line})
        os.close(before)

    def close(self) -> None:
        """End the journal and convert it to Parquet."""
        if self._file is not None:
            os.close(self._file)
        recover(self.folder)

    def _write(self, value: Any) -> bool:
        """Append a line; return whether it is written."""
        line = json.dumps(value, ensure_ascii=False).encode() + b"\n"
        self.fault = None
        try:
            file = self._begin() if self._file is None else self._file
            # What is left of a line before it must not take this one with it.
            line = b"\n" + line if self._torn else line
            self._torn = True
            if os.write(file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            self._torn = False
        except OSError as error:
            self.fault = error
            self.unlogged += 1
        return self.fault is None

    def _clean(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: self._redacted(value) if key in _TEXTS else value for key, value in row.items()
        }

    def _redacted(self, value: Any) -> Any:
        if isinstance(value, str):
            for pattern in self._patterns:
                value = pattern.sub("<redacted>", value)
            return value
        if isinstance(value, list):
            return [self._redacted(each) for each in value]
        if isinstance(value, dict):
            return {key: self._redacted(each) for key, each in value.items()}
        return value


def recover(folder: Path) -> int:
    """Convert the journals of processes that have ended to Parquet; return their number.

    One that cannot be converted, as on a full disk, stays: a reader takes its rows as they are.
    """
    count = 0
    for path in sorted(folder.glob("journal-*.jsonl")):
        try:
            with open(path, "rb") as file:
                if lock.try_open(file):
                    _to_parquet(path)
                    count += 1
        except FileNotFoundError:
            continue
        except OSError as error:
            with suppress(OSError):
                print(f"{path} stays a journal for now: {error}", file=sys.stderr, flush=True)
    return count


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the requests of a journal by COLUMNS; one without an answer has the status 0."""
    rows: dict[str, dict[str, Any]] = {}
    # Not splitlines: a text may hold other characters that it takes for ends of lines.
    for text in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        with suppress(ValueError):  # an incomplete last line, from a full disk
            for line in parse_json(text).values():
                rows.setdefault(line["request_id"], {"status": 0}).update(line)
    return [
        {
            name: as_text(row.get(name)) if kind == "string" else row.get(name)
            for name, kind in COLUMNS.items()
        }
        for row in rows.values()
    ]


def _to_parquet(path: Path) -> None:
    """Replace a journal by a Parquet file, none if the journal was empty."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if rows := rows_of(path):
        target = path.with_name(path.name.replace("journal-", "requests-")).with_suffix(".parquet")
        with replacing(target) as temporary:
            pq.write_table(pa.Table.from_pylist(rows, pa.schema(COLUMNS.items())), temporary)
            os.chmod(temporary, 0o600)
    path.unlink(missing_ok=True)


def as_text(value: Any) -> str | None:
    """Return a text as it is, and another value as JSON."""
    return value if isinstance(value, str) or value is None else json.dumps(value)


def read(folder: Path, since: float = 0.0) -> Iterator[dict[str, Any]]:
    """Yield each request since a time once, also from the journals of running processes.

    A request may be in two logs, as one that was sent to a second server after the loss of the
    first: the one with the answer counts. Texts are read in batches: only ids are kept in memory.
    """
    import pyarrow as pa
    from pyarrow import dataset

    recover(folder)
    # The journals first: one that becomes Parquet meanwhile is read twice instead of missed.
    living: list[dict[str, Any]] = []
    for path in sorted(folder.glob("journal-*.jsonl")):
        with suppress(FileNotFoundError):
            living += rows_of(path)
    # A log of an earlier version lacks some columns.
    paths = [str(path) for path in folder.glob("requests-*.parquet")]
    written = dataset.dataset(paths, pa.schema(COLUMNS.items()), format="parquet")

    def rows(columns: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        for batch in written.to_batches(columns, batch_size=1024):
            yield from ((_worth(row), row) for row in batch.to_pylist())
        yield from ((_worth(row), row) for row in living)

    best: dict[str, int] = {}
    for worth, row in rows(["request_id", "status"]):
        best[row["request_id"]] = max(worth, best.get(row["request_id"], 0))
    for worth, row in rows(list(COLUMNS)):
        if best.get(row["request_id"]) == worth:
            del best[row["request_id"]]
            if (row["time"] or 0) >= since:
                yield row


def _worth(row: Mapping[str, Any]) -> int:
    return 2 if row["status"] == 200 else 1 if row["status"] else 0
