"""Lines of files of any size: their end, their times, several files merged; never a whole file."""

import heapq
import math
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

# A progress bar may write megabytes without the end of a line.
_LONGEST_LINE = 64 * 1024
_BLOCK = 256 * 1024
# Bytes that are read at once from a log that is followed.
_MOST = 4 * 1024 * 1024
# Times at the beginning of a line, after the rank that torchrun or slurm/rank.sh may put there.
_STAMP = re.compile(
    r"(?:\[[^\]]{1,20}\]:? ?)?(?:"
    r"(?P<date>\d{4}-\d\d-\d\d)[T ](?P<clock>\d\d:\d\d:\d\d)(?P<part>[.,]\d+)?(?P<utc>Z|\+00:00)?"
    r"|[IWEF](?P<month>\d\d)(?P<day>\d\d) (?P<glog>\d\d:\d\d:\d\d)(?P<micro>\.\d+)?"
    r"|(?P<script>\d\d:\d\d:\d\d) cookbook: )"
)
_STEP = re.compile(r"step +(\d+)/")
_LOGGED = re.compile(rb'"step": (\d+)\b.*"time": ([\d.]+)')


@dataclass(frozen=True)
class Source:
    """A log file and what its lines are marked with if there are several."""

    path: Path
    origin: str

    def size(self) -> int:
        """Its bytes, 0 if it is not there (yet)."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0


def tail_start(path: Path, count: int) -> int:
    """Return where the last count lines of a file begin; reads its end only.

    count 0: where its last line ends, or where one begins that has no end yet.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            place = file.seek(0, os.SEEK_END)
            file.seek(max(0, place - 1))
            # The end of the last line begins none.
            wanted = max(1, count + (file.read(1) == b"\n"))
            farthest = max(0, place - (count + 1) * _LONGEST_LINE)
            while place > farthest:
                begin = max(farthest, place - _BLOCK)
                file.seek(begin)
                block = file.read(place - begin)
                newlines = block.count(b"\n")
                if newlines >= wanted:
                    position = len(block)
                    for _ in range(wanted):
                        position = block.rfind(b"\n", 0, position)
                    return begin + position + 1
                wanted -= newlines
                place = begin
            return place
    except OSError:
        return 0


def read(path: Path, start: int = 0, end: int | None = None) -> Iterator[str]:
    """Yield a file's lines from one place to another; one that is too long comes in pieces."""
    try:
        with open(path, "rb") as file:
            place = file.seek(start)
            while (end is None or place < end) and (line := file.readline(_LONGEST_LINE)):
                place += len(line)
                yield line.decode("utf-8", errors="replace").rstrip("\r\n")
    except FileNotFoundError:
        return


class Growing:
    """A log that is written to: what is new in it, by whole lines."""

    def __init__(self, path: Path, start: int = 0) -> None:
        self.path = path
        self._place = start

    def new_lines(self, ended: bool = False) -> list[str]:
        """Return the lines that have been finished since the last call, some megabytes at most.

        ended: nobody writes any more, so that the last line needs no end.
        """
        try:
            with open(self.path, "rb", buffering=0) as file:
                if file.seek(0, os.SEEK_END) < self._place:
                    self._place = 0  # somebody has emptied it
                file.seek(self._place)
                data = file.read(_MOST)
        except OSError:
            return []
        end = data.rfind(b"\n") + 1
        if ended or (not end and len(data) == _MOST):
            end = len(data)
        self._place += end
        if not end:
            return []
        text = data[:end].decode("utf-8", errors="replace").removesuffix("\n")
        return [line.rstrip("\r") for line in text.split("\n")]


def matching(lines: Iterable[str], pattern: re.Pattern[str] | None) -> Iterator[str]:
    """Yield the lines in which a pattern is found; all without one."""
    return (line for line in lines if pattern is None or pattern.search(line))


def last(lines: Iterable[str], count: int | None) -> Iterator[str]:
    """Yield the last lines of a stream; all if count is None."""
    return iter(lines) if count is None else iter(deque(lines, count))


class StepTimes:
    """The times of a run's logged steps, for ascending questions."""

    def __init__(self, metrics: Path) -> None:
        self._lines = self._read(metrics)
        self._step, self._time = -1, 0.0

    def at(self, step: int) -> float | None:
        """Return when a step was logged, None if it was not."""
        while self._step < step:
            entry = next(self._lines, None)
            if entry is None:
                return None
            self._step, self._time = entry
        return self._time if self._step == step else None

    @staticmethod
    def _read(metrics: Path) -> Iterator[tuple[int, float]]:
        try:
            with open(metrics, "rb") as file:
                for line in file:
                    if match := _LOGGED.search(line):
                        yield int(match[1]), float(match[2])
        except OSError:
            return


def merged(
    sources: Iterable[tuple[Source, int, int | None]], began: float, metrics: Path
) -> Iterator[tuple[str, str]]:
    """Yield origin and line of several files, each from one place to another, by time.

    A line has the time that it begins with, or that its step has in metrics.jsonl. One without goes
    with the line before it.

    Args:
        began: when the attempt started, which is the time of first lines that tell none.
    """
    # The job script tells whole seconds: its first line may have the one after the attempt's start.
    first = math.ceil(began)
    streams = [_timed(*each, first, StepTimes(metrics)) for each in sources]
    for _, _, source, line in heapq.merge(*streams, key=lambda each: each[0]):
        yield source.origin, line


def _timed(
    source: Source, start: int, end: int | None, began: float, steps: StepTimes
) -> Iterator[tuple[float, str, Source, str]]:
    now = began
    for line in read(source.path, start, end):
        match = _STEP.match(line)
        when = steps.at(int(match[1])) if match else stamp(line, began)
        # Clocks go back when a host's time is set; the lines of one file keep their order.
        now = max(now, when or now)
        yield now, source.origin, source, line


def stamp(line: str, began: float) -> float | None:
    """Return the time at which a line begins, in seconds since 1970; None if it tells none.

    Args:
        began: when the attempt started: formats without a date or a year mean the next such time.
    """
    match = _STAMP.match(line)
    if not match:
        return None
    start = datetime.fromtimestamp(began, UTC)
    try:
        if match["date"]:
            zone = UTC if match["utc"] else None
            text = f"{match['date']} {match['clock']}"
            when = datetime.fromisoformat(text).replace(tzinfo=zone).timestamp()
            return when + float((match["part"] or "0").replace(",", "."))
        if match["glog"]:
            # torch's own format has the node's local time and no year.
            text = f"{start.year}-{match['month']}-{match['day']} {match['glog']}"
            when = datetime.fromisoformat(text).timestamp() + float(match["micro"] or 0)
            return when if when > began - 86400 * 180 else when + 86400 * 365
        clock = time.strptime(match["script"], "%H:%M:%S")
    except ValueError:
        return None
    midnight = datetime(start.year, start.month, start.day, tzinfo=UTC).timestamp()
    when = midnight + clock.tm_hour * 3600 + clock.tm_min * 60 + clock.tm_sec
    return when if when >= began - 43200 else when + 86400
