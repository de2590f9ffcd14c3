"""--since: a time as people type it, how long ago or a date."""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from launcher.errors import UsageFault

_AGO = re.compile(r"(\d{1,5}) ?(m|min|h|d|w)\Z")
_HOURS = {"m": 1 / 60, "min": 1 / 60, "h": 1, "d": 24, "w": 168}


def since_option(purpose: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add --since to a command, which gets seconds since 1970; None without the option."""
    text = f"{purpose}: 90m, 12h, 3d, 2w, 2026-01-31."
    return click.option("--since", metavar="TIME", help=text, callback=_seconds)


def _seconds(ctx: click.Context, option: click.Parameter, given: str | None) -> float | None:
    """Return what 3d, 2026-01-31 or 2026-01-31T23:59 means; without a zone it is UTC."""
    if given is None:
        return None
    if ago := _AGO.match(given):
        when = datetime.now(UTC) - timedelta(hours=int(ago[1]) * _HOURS[ago[2]])
        return when.timestamp()
    try:
        when = datetime.fromisoformat(given)
    except ValueError:
        message = f"--since {given}: write how long ago (90m, 12h, 3d, 2w) or a date"
        raise UsageFault(f"{message} (2026-01-31, 2026-01-31T23:59)") from None
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
