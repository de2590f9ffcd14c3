"""What keeps failing while an endpoint goes on serving: a full disk, files that cannot be read."""

import asyncio
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

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

    def allow_descriptors(self) -> None:
        """Let this process have as many descriptors as its hard limit allows; say if it needs more.

        The running loop accepts connections again a second after it could not.
        """
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

        def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            error = context.get("exception")
            if "socket" in context and isinstance(error, OSError):
                # asyncio says it a thousand times a second.
                self.tell("new connections", str(error))
            else:
                loop.default_exception_handler(context)

        asyncio.get_running_loop().set_exception_handler(handle)


def stop_event() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set, for the running loop."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    return ended


def say(text: str) -> None:
    """Print a line to the process's own log, which may lie on the disk that is full."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
