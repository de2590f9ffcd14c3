"""A time as people type it: how long ago, or a date. Standard library only."""

import re
from datetime import UTC, datetime, timedelta

_AGO = re.compile(r"(\d{1,5}) ?(m|min|h|d|w)\Z")
_HOURS = {"m": 1 / 60, "min": 1 / 60, "h": 1, "d": 24, "w": 168}
FORMS = "90m, 12h, 3d, 2w, 2026-01-31"


def moment(text: str) -> datetime:
    """Return the time that a text means: 90m, 12h, 3d or 2w ago, 2026-01-31, 2026-01-31T23:59.

    A date without a zone is in UTC.

    Raises:
        ValueError: it means none; the text says what may be written.
    """
    if ago := _AGO.match(text):
        return datetime.now(UTC) - timedelta(hours=int(ago[1]) * _HOURS[ago[2]])
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        message = f"--since {text}: write how long ago (90m, 12h, 3d, 2w) or a date"
        raise ValueError(f"{message} (2026-01-31, 2026-01-31T23:59)") from None
    return when if when.tzinfo else when.replace(tzinfo=UTC)


def seconds(text: str) -> float:
    """Return the same as seconds since 1970."""
    return moment(text).timestamp()
