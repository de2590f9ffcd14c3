"""Numbers as values of options: click's ranges, whose errors say what to give."""

from typing import Any

import click


class IntRange(click.IntRange):
    """A whole number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"must be a whole number{_bounds(self)}, got {value!r}", param, ctx)


class FloatRange(click.FloatRange):
    """A number."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"must be a number{_bounds(self)}, got {value!r}", param, ctx)


def _bounds(kind: click.IntRange | click.FloatRange) -> str:
    least = f"more than {kind.min}" if kind.min_open else f"{kind.min} or more"
    if kind.max is None:
        return f", {least}"
    if kind.min_open:
        return f", {least} and at most {kind.max}"
    return f" from {kind.min} to {kind.max}"
