"""Step lines of a run in the live view: they fit its width."""

import re

# A line of trainer/metrics.py, after the run's name if several are watched.
_STEP = re.compile(r"(?:\S+ \| )?step +\d+/\d+  ")
# What is left out first on a narrow terminal.
_FIELDS = (
    re.compile(r"  grad norm +\S+"),
    re.compile(r"  mem +\S+ GiB"),
    re.compile(r"  epoch +\S+"),
    re.compile(r"  lr \S+"),
    re.compile(r"  MFU +\S+ %"),
    re.compile(r"  +\S+ tok/s/GPU"),
)


def is_step(line: str) -> bool:
    """Whether it is the trainer's line of a step."""
    return _STEP.match(line) is not None


def fitted(line: str, width: int) -> str:
    """Return a step's line in at most so many characters; fields that are missed least go first."""
    for field in _FIELDS:
        if len(line) <= width:
            break
        line = field.sub("", line, count=1)
    return line if len(line) <= width else f"{line[: max(0, width - 1)]}…"
