"""A hint for a mistyped name."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint ' (did you mean X?)' for a mistyped name, or '' if nothing is near."""
    known = list(known)
    longer = [other for other in known if len(name) > 2 and other.startswith(name)]
    close = sorted(longer, key=lambda other: (len(other), other))
    close = close or get_close_matches(name, known, n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""
