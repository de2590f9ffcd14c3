"""The error of data preparation: one or more faults, each one line."""

from collections.abc import Sequence


class DataError(Exception):
    """What is wrong with sources, rows or settings; exit_code as the cookbook command's."""

    def __init__(self, *faults: str, exit_code: int = 1) -> None:
        self.faults: Sequence[str] = faults
        self.exit_code = exit_code
        super().__init__("\n".join(faults))


class BadRow(Exception):
    """A record that its format cannot read; the text says why."""
