"""Autoscaling: the number of servers of each version of an endpoint, by its gateway's requests.

The gateway decides and writes scale.json; cookbook serve --adjust NAME, which it starts, submits
and ends the jobs.
"""

import asyncio
import math
import sys
import time
from collections import deque
from pathlib import Path

from plugins.serve import endpoint as endpoints
from plugins.serve.faults import say
from runspec import files
from runspec.storage import patiently

# How long a load has to last before another server is started; the first one starts at once.
_SUSTAINED_S = 5.0
# How often the jobs are checked: they may end for other reasons, too.
_LOOK_EVERY_S = 60.0


class Scaler:
    """Decides the number of servers, and starts the command that adjusts the jobs.

    Args:
        per_server: concurrent requests per server.
        idle_s: how long a server must not be needed before it ends.
    """

    def __init__(self, folder: Path, per_server: int, idle_s: float) -> None:
        self.folder, self.per_server, self.idle_s = folder, per_server, idle_s
        # A restarted gateway continues with the numbers of the one before it.
        self.wanted = patiently(endpoints.wanted, folder)
        self._loads: deque[tuple[float, int, int]] = deque()
        self._began: float | None = None
        self._adjusted = -math.inf
        self._task: asyncio.Task[None] | None = None

    def decide(self, load: int, peak: int, now: float) -> bool:
        """Record the load, and return whether the number of servers changes.

        Args:
            load: requests that are being answered or wait for a server.
            peak: the maximum of that since the last call.
        """
        self._began = now if self._began is None else self._began
        self._loads.append((now, load, peak))
        while self._loads and now - self._loads[0][0] > max(self.idle_s, _SUSTAINED_S):
            self._loads.popleft()
        ranges, shares = endpoints.ranges(self.folder), endpoints.shares(self.folder)
        lasting = min(low for when, low, _ in self._loads if now - when <= _SUSTAINED_S)
        before, wanted = self.wanted, {}
        for version, (least, most) in ranges.items():
            share = shares.get(version, 1 / len(ranges))
            count = min(max(before.get(version, least), least), most)
            needed = max(self._count(high, share) for _, _, high in self._loads)
            if now - self._began >= _SUSTAINED_S:
                count = max(count, self._count(lasting, share))
            if peak and share > 0:
                count = max(count, 1)
            if now - self._began >= self.idle_s:
                count = min(count, needed)
            wanted[version] = min(max(count, least), most)
        self.wanted = wanted
        return wanted != before

    def _count(self, load: int, share: float) -> int:
        return math.ceil(load * share / self.per_server)

    async def look(self, load: int, peak: int) -> None:
        """Decide, and start the command that adjusts the jobs, one at a time."""
        now = time.monotonic()
        try:
            if await asyncio.to_thread(self.decide, load, peak, now):
                place, content = self.folder / endpoints.SCALE, {"wanted": self.wanted}
                await asyncio.to_thread(files.write_json, place, content, 0o600)
                self._adjusted = -math.inf
        except (OSError, files.DamagedFile) as error:
            # The gateway continues, and tries again at the next call.
            say(f"{self.folder.name}: {error}")
            return
        running = self._task is not None and not self._task.done()
        if self.wanted and not running and now - self._adjusted >= _LOOK_EVERY_S:
            self._adjusted = now
            self._task = asyncio.create_task(self._adjust())

    async def _adjust(self) -> None:
        argv = [sys.executable, "-m", "launcher", "serve", "--adjust", self.folder.name]
        process = await asyncio.create_subprocess_exec(*argv, stdin=asyncio.subprocess.DEVNULL)
        await process.wait()
