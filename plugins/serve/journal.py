"""The log of requests: JSON lines that survive a kill.

A request is written when it is accepted, and its answer when it is sent, each by one write to a
file opened for appending, so that a killed process loses no accepted request. A disk that is full
costs lines of the log, and no answer.
"""

import errno
import json
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from runspec.files import parse_json

# Removed from all texts: mail addresses, phone numbers, keys.
REDACTED = (
    r"[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}",
    r"(?<!\w)\+?\d[\d ()/-]{7,}\d(?!\w)",
    r"\b(?:sk|hf|ghp|xox[abp])[-_][A-Za-z0-9_-]{16,}",
)
# What the log has of each request.
COLUMNS = (
    *("request_id", "time", "endpoint", "model", "messages", "answer", "answers", "status"),
    *("stream", "latency_s", "first_token_s", "prompt_tokens", "answer_tokens", "parameters"),
)
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
        self._open: set[str] = set()
        self._file: int | None = None
        self._torn = False
        self.unlogged = 0
        self.fault: OSError | None = None
        # Others see from now on that there is a log.
        try:
            self._begin()
        except OSError as error:
            self.fault = error

    def _begin(self) -> int:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark = f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
        self._file = os.open(self.folder / f"requests-{mark}.jsonl", flags, 0o600)
        self._torn = False
        return self._file

    def accepted(self, row: Mapping[str, Any]) -> bool:
        """Write a request before it is answered; return whether it is in the log."""
        written = self._write(self._clean(row))
        if written:
            self._open.add(row["request_id"])
        return written

    def answered(self, request_id: str, answer: Mapping[str, Any]) -> None:
        """Write the outcome of a request that is in the log."""
        if request_id in self._open:
            self._open.remove(request_id)
            self._write({"request_id": request_id, **self._clean(answer)})

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)

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
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))
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


def read(folder: Path, since: float = 0.0) -> Iterator[dict[str, Any]]:
    """Yield each request since a time once, by COLUMNS; one without an answer has the status 0.

    A request may be in two files, as one that was sent to a second server after the loss of the
    first: the one with the answer counts. In memory are only ids, and what has no answer.
    """
    answered: set[str] = set()
    others: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("requests-*.jsonl")):
        for row in _rows_of(path):
            name = row["request_id"]
            if (row["time"] or 0) < since or name in answered:
                continue
            if row["status"] == 200:
                answered.add(name)
                yield row
            elif name not in others or row["status"]:
                others[name] = row
    yield from (row for name, row in others.items() if name not in answered)


def _rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the requests of a file, those without an answer last."""
    running: dict[str, dict[str, Any]] = {}
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        for text in file:
            with suppress(ValueError, KeyError, TypeError):  # an incomplete line of a full disk
                line = parse_json(text)
                if (accepted := running.pop(line["request_id"], None)) is None:
                    running[line["request_id"]] = line
                else:
                    yield _row(accepted | line)
    yield from map(_row, running.values())


def _row(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: line.get(name) for name in COLUMNS} | {"status": line.get("status") or 0}
