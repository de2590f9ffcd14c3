"""The servers behind an endpoint, and the choice of one for a request."""

import random
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from plugins.serve import endpoint

# For how long a server that has failed is asked last.
BEAT_S = 3.0


@dataclass
class Upstream:
    """Where a proxy sends requests: one server to a gateway, the backend to a front."""

    name: str
    url: str
    socket: str | None = None
    # Whether it takes new requests.
    ready: bool = False
    # The requests that this process has sent to it.
    in_flight: int = 0
    failed_at: float = 0.0
    _session: aiohttp.ClientSession | None = field(default=None, repr=False)

    @property
    def session(self) -> aiohttp.ClientSession:
        """The connections to it, which stay open."""
        if self._session is None:
            kind = aiohttp.UnixConnector if self.socket else aiohttp.TCPConnector
            place: dict[str, Any] = {"path": self.socket} if self.socket else {}
            # Less than the server's own time, so that none is used that the other side closes.
            connector = kind(limit=0, keepalive_timeout=15, **place)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        return self._session

    async def close(self) -> None:
        """Close the connections; what is asked on them is asked of another one."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def healthy(self) -> bool:
        """Whether it answers that it can take requests."""
        timeout = aiohttp.ClientTimeout(total=5)
        with suppress(aiohttp.ClientError, OSError):
            async with self.session.get(f"{self.url}/health", timeout=timeout) as answer:
                return answer.status == 200
        return False


class Pool:
    """The servers of an endpoint as a gateway knows them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: dict[str, Upstream] = {}
        # Those whose file was removed or is not renewed.
        self.gone: list[Upstream] = []

    def refresh(self) -> None:
        """Read the servers' files: new ones are used, draining ones get no more requests.

        Raises:
            OSError: a file cannot be read; what is known stays.
        """
        present = {}
        for facts in endpoint.servers(self.folder):
            if facts.get("state") in ("ready", "draining") and endpoint.reachable(facts):
                name, url = facts["name"], str(facts["url"])
                present[name] = upstream = self.known.get(name) or Upstream(name, url)
                upstream.url, upstream.ready = url, facts["state"] == "ready"
        self.gone += [each for name, each in self.known.items() if name not in present]
        self.known = present

    async def dismiss(self) -> None:
        """Close the connections to servers that are gone, so that their requests go elsewhere.

        A lost node closes no connection: its requests would wait until their timeout. A server
        whose file is not renewed because a filesystem hangs may still answer.
        """
        gone, self.gone = self.gone, []
        for upstream in gone:
            there = endpoint.server_file(self.folder, upstream.name).exists()
            if there and await upstream.healthy():
                self.known.setdefault(upstream.name, upstream)
            else:
                await upstream.close()

    def choose(self, tried: set[str]) -> Upstream | None:
        """Return the least busy server, None if there is none."""
        usable = [b for b in self.known.values() if b.ready and b.name not in tried]
        # One that has just failed is asked last.
        fresh = [b for b in usable if time.monotonic() - b.failed_at > BEAT_S] or usable
        return min(fresh, key=lambda b: (b.in_flight, random.random()), default=None)
