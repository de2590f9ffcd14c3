"""Text of runs made fit to show: nothing that a terminal obeys, times as people write them."""

import math
import re
from typing import TypeGuard

# Colours of a log, which are left out; every other control character is shown as what it is.
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
# C0 and C1 without the tab, and what turns the direction of text around.
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """Return text that only shows on a terminal: no colours, control characters as \\x1b."""
    if text.isprintable():
        return text
    return _CONTROL.sub(_escaped, _COLOUR.sub("", text))


def _escaped(match: re.Match[str]) -> str:
    return match.group().encode("unicode_escape").decode("ascii")


def duration(seconds: float) -> str:
    """Return a length of time as people write it: 42 s, 3 min 10 s, 5 h 2 min, 3 d 4 h."""
    seconds = max(0, int(seconds))
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    if seconds < 86400:
        return f"{seconds // 3600} h {seconds % 3600 // 60} min"
    return f"{seconds // 86400} d {seconds % 86400 // 3600} h"


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a finite number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def number(value: object, form: str = "", unit: str = "") -> str:
    """Return a figure in a format such as ",.0f" with its unit; "-" for what is no figure."""
    return f"{format(value, form)}{unit}" if is_number(value) else "-"


def percent(value: object) -> str:
    """Return a share such as 0.412 as 41.2 %; "-" for what is no figure."""
    return f"{100 * value:.1f} %" if is_number(value) else "-"
