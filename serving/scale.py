"""How many replicas each version of an endpoint gets, by the requests that its gateway has.

The gateway decides and writes scale.json; cookbook serve --adjust NAME, which it starts, submits
and ends the jobs.
"""

import asyncio
import math
import sys
import time
from collections import deque
from pathlib import Path

from runspec import endpoint as endpoints
from runspec import files

# A load has to last so long before another replica is started; the first one starts at once.
_SUSTAINED_S = 5.0
# Jobs end for other reasons, too: it is looked so often whether one is missing.
_LOOK_EVERY_S = 60.0


class Scaler:
    """Decides, and has it done.

    Args:
        per_replica: requests at a time that one replica is to have.
        idle_s: how long a replica must not have been needed before it ends.
    """

    def __init__(self, folder: Path, per_replica: int, idle_s: float) -> None:
        self.folder, self.per_replica, self.idle_s = folder, per_replica, idle_s
        # A gateway that is started again goes on with what the one before it wanted.
        self.wanted = endpoints.wanted(folder)
        self._loads: deque[tuple[float, int, int]] = deque()
        self._began: float | None = None
        self._adjusted = -math.inf
        self._task: asyncio.Task[None] | None = None

    def decide(self, load: int, peak: int, now: float) -> bool:
        """Note the load, and return whether the number of replicas changes by it.

        Args:
            load: requests that are answered or wait for a replica now; peak: most of them at a
                time since the last call.
        """
        self._began = now if self._began is None else self._began
        self._loads.append((now, load, peak))
        while self._loads and now - self._loads[0][0] > max(self.idle_s, _SUSTAINED_S):
            self._loads.popleft()
        ranges, shares = endpoints.ranges(self.folder), endpoints.shares(self.folder)
        lasting = min(low for when, low, _ in self._loads if now - when <= _SUSTAINED_S)
        before, found = self.wanted, {}
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
            found[version] = min(max(count, least), most)
        self.wanted = found
        return found != before

    def _count(self, load: int, share: float) -> int:
        return math.ceil(load * share / self.per_replica)

    async def look(self, load: int, peak: int) -> None:
        """Decide, and start what adjusts the jobs; only one at a time."""
        try:
            await self._look(load, peak, time.monotonic())
        except OSError as error:
            # The gateway goes on: it is looked again.
            print(f"{self.folder.name}: {error}", file=sys.stderr, flush=True)

    async def _look(self, load: int, peak: int, now: float) -> None:
        changed = await asyncio.to_thread(self.decide, load, peak, now)
        if changed:
            content = {"wanted": self.wanted}
            await asyncio.to_thread(files.write_json, self.folder / endpoints.SCALE, content, 0o600)
            self._adjusted = -math.inf
        running = self._task is not None and not self._task.done()
        if self.wanted and not running and now - self._adjusted >= _LOOK_EVERY_S:
            self._adjusted = now
            self._task = asyncio.create_task(self._adjust())

    async def _adjust(self) -> None:
        argv = [sys.executable, "-m", "launcher", "serve", "--adjust", self.folder.name]
        process = await asyncio.create_subprocess_exec(*argv, stdin=asyncio.subprocess.DEVNULL)
        await process.wait()
