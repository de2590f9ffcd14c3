"""Lines of files of any size: their end, and what is new in them; never a whole file."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# A progress bar may write megabytes without the end of a line.
_LONGEST_LINE = 64 * 1024
_BLOCK = 256 * 1024
# Bytes that are read at once from a log that is followed.
_MOST = 4 * 1024 * 1024


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
