"""What was read of runs that have ended, kept for the next time, in one file per user and root.

The files of such a run change only by being replaced, which changes the time of its directory: if
that is as it was, one look takes the place of reading four files.
"""

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from launcher import paths
from launcher.runs.directory import Run
from launcher.runs.states import own_state
from runspec import files
from runspec.states import FINAL

# Filesystems tell two changes apart that are so far from each other.
_SETTLED_S = 2.0
# The file is written again for so many new rows.
_WORTH_WRITING = 64

Row = dict[str, Any]


class EndedRows:
    """What a command keeps of the runs in one root.

    Args:
        command: its name.
        form: another text when a row's keys or their meaning change: older rows are not used then.
    """

    def __init__(self, root: Path, command: str, form: str) -> None:
        name = sha256(str(root.absolute()).encode()).hexdigest()[:16]
        self.file = paths.user_cache() / f"{command}-{name}.json"
        self._form = form
        self._marks: dict[str, str] = {}
        self._kept: dict[str, Any] = {}
        # Texts that rows name by their number, because many rows have them.
        self.texts: list[str] = []
        content = files.peek(self.file)
        if content.get("format") == form:
            rows, texts = content.get("rows"), content.get("texts")
            if isinstance(rows, dict) and isinstance(texts, list):
                self._kept, self.texts = rows, texts

    def find(self, runs: Iterable[Run]) -> dict[str, Row]:
        """Return the rows of the runs that are as they were."""
        rows, now = {}, time.time()
        for run in runs:
            if not (mark := _mark(run, now)):
                continue
            self._marks[run.name] = mark
            kept = self._kept.get(run.name)
            if isinstance(kept, list) and len(kept) == 2 and kept[0] == mark:
                rows[run.name] = kept[1]
        return rows

    def keep(self, runs: Sequence[Run], rows: Mapping[str, Row]) -> None:
        """Keep the rows of runs that have ended; find has looked at them before they were read."""
        new = {name: [self._marks[name], row] for name, row in rows.items() if name in self._marks}
        if len(new) < _WORTH_WRITING:
            return
        present = {run.name for run in runs}
        kept = {name: each for name, each in self._kept.items() if name in present}
        # A cache that cannot be written costs time, and nothing else.
        with suppress(OSError):
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            content = {"format": self._form, "texts": self.texts, "rows": {**kept, **new}}
            files.write_text(self.file, json.dumps(content), mode=0o600)


def settled(run: Run) -> bool:
    """Return whether a run has ended by its own word and nothing about it is open or broken."""
    return own_state(run) in FINAL and not (run.starting or run.broken())


def _mark(run: Run, now: float) -> str:
    """Return what changes with each change of a run's directory, "" if that was just now."""
    try:
        # A network filesystem asks its server when a directory is opened, and else now and then.
        descriptor = os.open(run.path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return ""
    try:
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return f"{status.st_ino}-{status.st_mtime_ns}" if now - status.st_mtime > _SETTLED_S else ""
