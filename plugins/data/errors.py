"""The error of data preparation: one or more faults, each one line."""

from collections.abc import Sequence


class DataError(Exception):
    """Faults of sources, rows or settings; exit_code: that of the cookbook command."""

    def __init__(self, *faults: str, exit_code: int = 1) -> None:
        self.faults: Sequence[str] = faults
        self.exit_code = exit_code
        super().__init__("\n".join(faults))


class BadRow(Exception):
    """A record that its format cannot read, with the reason."""


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its class."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
