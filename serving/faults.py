"""What keeps failing while an endpoint goes on serving: a full disk, files that cannot be read."""

import sys
import time
from collections.abc import Callable
from contextlib import suppress

from runspec.files import DamagedFile

# A fault that lasts is said again after this time.
_AGAIN_S = 60.0


class Faults:
    """Says what fails, and that it works again."""

    def __init__(self) -> None:
        self._said: dict[str, float] = {}

    def trying(self, what: str, act: Callable[[], object]) -> None:
        """Do what serving does not depend on; say that it fails if it fails to read or write."""
        try:
            act()
        except (OSError, DamagedFile) as error:
            self.tell(what, str(error))
        else:
            self.tell(what, "")

    def tell(self, what: str, fault: str) -> None:
        """Say that something fails, "" if it works."""
        before, now = self._said.get(what), time.monotonic()
        if not fault:
            if self._said.pop(what, None) is not None:
                say(f"{what}: works again")
        elif before is None or now - before > _AGAIN_S:
            self._said[what] = now
            say(f"ERROR: {what}: {fault}")


def say(text: str) -> None:
    """Print a line to the process's own log, which may lie on the disk that is full."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
