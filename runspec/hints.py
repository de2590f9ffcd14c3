"""A hint for a mistyped name."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint ' (did you mean X?)' for a mistyped name, or '' if nothing is near."""
    close = _closest(name, known)
    return f" (did you mean {close}?)" if close else ""


def nearest_key(name: str, known: Iterable[str]) -> str:
    """Return such a hint for a key, with its block, by what follows the last dot of the keys."""
    by_last = {key.rpartition(".")[2]: key for key in known}
    close = _closest(name.rpartition(".")[2], by_last)
    return f" (did you mean {by_last[close]}?)" if close else ""


def _closest(name: str, known: Iterable[str]) -> str:
    by_lower = {other.lower(): other for other in known}
    low = name.lower()
    longer = [other for other in by_lower if len(low) > 2 and other.startswith(low)]
    close = sorted(longer, key=lambda other: (len(other), other))
    close = close or get_close_matches(low, by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else ""
