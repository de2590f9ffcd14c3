"""Step lines of a run on a terminal: they fit its width, and one line in seconds is shown."""

import re
import time
from collections.abc import Callable

# A line of trainer/metrics.py, after the run's name if several are watched.
_STEP = re.compile(r"(?P<mark>\S+ \| )?step +\d+/\d+  ")
# What is left out first on a narrow terminal.
_FIELDS = (
    re.compile(r"  grad norm +\S+"),
    re.compile(r"  mem +\S+ GiB"),
    re.compile(r"  epoch +\S+"),
    re.compile(r"  lr \S+"),
    re.compile(r"  MFU +\S+ %"),
    re.compile(r"  +\S+ tok/s/GPU"),
)
# So seldom a step's line is shown, in seconds.
PACE_S = 2.0


def is_step(line: str) -> bool:
    """Whether it is the trainer's line of a step."""
    return _STEP.match(line) is not None


def fitted(line: str, width: int) -> str:
    """Return a step's line in at most this many characters; less important fields go first."""
    for field in _FIELDS:
        if len(line) <= width:
            break
        line = field.sub("", line, count=1)
    return line if len(line) <= width else f"{line[: max(0, width - 1)]}…"


class Paced:
    """Says lines, of those of steps one in PACE_S seconds; the log has all.

    The newest step before another line, and the last one, are never left out.

    Args:
        width: of the terminal, asked at each line.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        width: Callable[[], int],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._width, self._now = say, width, now
        # By the mark of the run: when a step was shown, and the newest that was not.
        self._shown: dict[str, float] = {}
        self._held: dict[str, str] = {}
        self._told = False

    def __call__(self, line: str) -> None:
        """Say a line, now or with the next one."""
        match = _STEP.match(line)
        if match is None:
            self.flush()
            self._say(line)
            return
        mark, now = match["mark"] or "", self._now()
        if "  val loss " not in line and now - self._shown.get(mark, -PACE_S) < PACE_S:
            self._held[mark] = line
            return
        if self._held.pop(mark, None) and not self._told:
            self._told = True
            self._say(f"(of the steps' lines one in {PACE_S:.0f} s is shown; the log has all)")
        self._shown[mark] = now
        self._say(fitted(line, self._width()))

    def flush(self) -> None:
        """Say the newest lines that were held back."""
        for line in self._held.values():
            self._say(fitted(line, self._width()))
        self._held.clear()
