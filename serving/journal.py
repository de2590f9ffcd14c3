"""The log of requests: a journal that survives a kill, and Parquet files made from it.

A request is written to the journal when it is accepted, and its answer when it is sent. A line is
one write to a file opened for appending, so that a killed process loses no accepted request.
Journals become Parquet: those of running processes at intervals, those of ended processes when the
next one starts or reads the log. A disk that is full costs lines of the log, and no answer.
"""

import errno
import hashlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
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
COLUMNS = (
    "request_id",
    "client_id",
    "user",
    "time",
    "endpoint",
    "model",
    "messages",
    "answer",
    "answers",
    "status",
    "stream",
    "latency_s",
    "first_token_s",
    "prompt_tokens",
    "answer_tokens",
    "parameters",
)
# What people write; an id is not redacted, even if it has the digits of a phone number.
_TEXTS = {"messages", "answer", "answers", "parameters"}
# The Arrow types of columns that are no text.
_TYPES = dict.fromkeys(("time", "latency_s", "first_token_s"), "double")
_TYPES |= dict.fromkeys(("status", "prompt_tokens", "answer_tokens"), "int64") | {"stream": "bool"}


class Journal:
    """One process's log of requests under a folder.

    unlogged: how many lines could not be written. fault: why the last one could not, None if it is
    written.
    """

    def __init__(self, folder: Path, share: float = 1.0, redact: Iterable[str] = ()) -> None:
        self.folder, self.share = folder, share
        self._patterns = [re.compile(each) for each in (*REDACTED, *redact)]
        self._open: dict[str, dict[str, Any]] = {}
        self._file: int | None = None
        self._torn = False
        self.path, self.since, self.rows = folder, time.time(), 0
        self.unlogged = 0
        self.fault: OSError | None = None
        recover(folder)
        # Others see from now on that there is a log.
        self._trying(self._begin)

    def _begin(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark = f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"
        path = self.folder / f"journal-{mark}.jsonl"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
        file = os.open(path, flags, 0o600)
        # The kernel releases the lock when the process ends: then other processes may read it.
        lock.try_open(file)
        self.path, self._file, self._torn = path, file, False
        self.since, self.rows = time.time(), 0

    def wants(self, request_id: str) -> bool:
        """Whether a request is logged; the same for the same id."""
        place = int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "big")
        return place < self.share * 2**64

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

    def switch(self) -> tuple[int, Path, set[str]] | None:
        """Begin a new journal; return the one before for turn_over, None if it has no answer yet.

        It is quick, and must not run concurrently with accepted and answered; turn_over may.

        Raises:
            OSError: no new one can be made; the one before goes on.
        """
        if not self.rows or self._file is None:
            return None
        before, path = self._file, self.path
        self._begin()
        # Those that are still being answered go into the new journal.
        for line in self._open.values():
            self._write({"accepted": line})
        return before, path, set(self._open)

    def close(self) -> None:
        """End the journal and convert it to Parquet."""
        if self._file is not None:
            os.close(self._file)
        recover(self.folder)

    def _write(self, value: Any) -> bool:
        """Append a line; return whether it is written."""
        text = json.dumps(value, ensure_ascii=False).encode() + b"\n"
        written = self._trying(lambda: self._append(text))
        self.unlogged += not written
        return written

    def _append(self, line: bytes) -> None:
        if self._file is None:
            self._begin()
        assert self._file is not None
        # What is left of a line before it must not take this one with it.
        line = b"\n" + line if self._torn else line
        self._torn = True
        if os.write(self._file, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self._torn = False

    def _trying(self, act: Callable[[], None]) -> bool:
        try:
            act()
        except OSError as error:
            self.fault = error
            return False
        self.fault = None
        return True

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


def turn_over(file: int, path: Path, leave_out: set[str]) -> None:
    """Convert a journal to Parquet after switch.

    Raises:
        OSError: it cannot be written; the journal stays, and the next recover tries again.
    """
    try:
        to_parquet(path, leave_out)
    finally:
        os.close(file)


def recover(folder: Path) -> int:
    """Convert the journals of processes that have ended to Parquet; return their number.

    One that cannot be converted, as on a full disk, stays: a reader takes its rows as they are.
    """
    count = 0
    for path in sorted(folder.glob("journal-*.jsonl")):
        try:
            with open(path, "rb") as file:
                if lock.try_open(file):
                    to_parquet(path)
                    count += 1
        except FileNotFoundError:
            continue
        except OSError as error:
            with suppress(OSError):
                print(f"{path} stays a journal for now: {error}", file=sys.stderr, flush=True)
    return count


def rows_of(path: Path, leave_out: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Return the requests of a journal; one without an answer has the status 0."""
    rows: dict[str, dict[str, Any]] = {}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = parse_json(text)
        except ValueError:
            continue  # an incomplete last line, from a full disk
        for kind in ("accepted", "answered"):
            if kind in line:
                rows.setdefault(line[kind]["request_id"], {"status": 0}).update(line[kind])
    skip = set(leave_out)
    return [row for key, row in rows.items() if key not in skip]


def to_parquet(path: Path, leave_out: Iterable[str] = ()) -> Path | None:
    """Replace a journal by a Parquet file; return it, None if the journal was empty."""
    rows = rows_of(path, leave_out)
    target = None
    if rows:
        target = path.with_name(path.name.replace("journal-", "requests-")).with_suffix(".parquet")
        _write(target, rows)
    with suppress(FileNotFoundError):
        path.unlink()
    return target


def _write(target: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([(name, _TYPES.get(name, "string")) for name in COLUMNS])
    lines = [{name: _value(row, name) for name in COLUMNS} for row in rows]
    with replacing(target) as temporary:
        pq.write_table(pa.Table.from_pylist(lines, schema), temporary)
        os.chmod(temporary, 0o600)


def _value(row: Mapping[str, Any], name: str) -> Any:
    """Return a value as Parquet has it: a text column holds other values as JSON."""
    value = row.get(name)
    return value if name in _TYPES else as_text(value)


def as_text(value: Any) -> str | None:
    """Return a text as it is, and another value as JSON."""
    return value if isinstance(value, str) or value is None else json.dumps(value)


def read(folder: Path, since: float = 0.0) -> Iterator[dict[str, Any]]:
    """Yield each request since a time once, also from the journals of running processes.

    A request that was sent to a second replica after the loss of the first is in two logs: the one
    with the answer counts. Texts are read in batches: only the ids are kept in memory.
    """
    recover(folder)
    # The journals first: one that becomes Parquet meanwhile is read twice instead of missed.
    living = list(_living(folder))
    written = sorted(folder.glob("requests-*.parquet"))
    best: dict[str, tuple[int, int]] = {}
    for place, row in _numbered(living, written, ["request_id", "status"]):
        worth = 2 if row["status"] == 200 else 1 if row["status"] else 0
        if worth > best.get(row["request_id"], (-1, 0))[0]:
            best[row["request_id"]] = (worth, place)
    for place, row in _numbered(living, written, list(COLUMNS)):
        if best[row["request_id"]][1] == place and (row["time"] or 0) >= since:
            yield row


def _numbered(
    living: list[dict[str, Any]], written: list[Path], columns: list[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of Parquet files and of living journals, numbered."""
    import pyarrow.parquet as pq

    place = 0
    for path in written:
        file = pq.ParquetFile(path)
        # A log of an earlier version lacks some.
        there = [name for name in columns if name in file.schema_arrow.names]
        for batch in file.iter_batches(1024, columns=there):
            for row in batch.to_pylist():
                yield place, {**dict.fromkeys(columns), **row}
                place += 1
    yield from enumerate(living, place)


def _living(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the journals of running processes, in the form of the Parquet files."""
    for path in sorted(folder.glob("journal-*.jsonl")):
        with suppress(FileNotFoundError):
            for row in rows_of(path):
                yield {name: _value(row, name) for name in COLUMNS}
