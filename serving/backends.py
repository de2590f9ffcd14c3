"""The replicas behind an endpoint, and the choice of one for a request."""

import asyncio
import json
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from runspec import endpoint

# For how long a replica that has failed is asked last.
BEAT_S = 3.0


@dataclass
class Backend:
    """One replica, or an engine: its address, what it serves, and how busy this process keeps it.

    key: its own API key, None for the key of the endpoint.
    """

    name: str
    url: str
    version: str = ""
    socket: str | None = None
    key: str | None = None
    draining: bool = False
    in_flight: int = 0
    failed_at: float = 0.0
    session: aiohttp.ClientSession | None = field(default=None, repr=False)


def stop_event() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set, for the running loop."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    return ended


class Pool:
    """The replicas of an endpoint as a gateway knows them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: dict[str, Backend] = {}
        self.shares: dict[str, float] = {}

    def refresh(self) -> list[Backend]:
        """Read the replicas' files: new ones are used, draining ones get no more requests.

        Returns:
            Replicas whose file was removed or is not renewed.

        Raises:
            OSError: a file cannot be read; what is known stays.
        """
        shares, present = endpoint.shares(self.folder), {}
        for facts in endpoint.replicas(self.folder):
            if facts.get("state") not in ("ready", "draining") or not endpoint.reachable(facts):
                continue
            name = facts["name"]
            backend = self.known.get(name) or Backend(name, str(facts["url"]))
            backend.url, backend.version = str(facts["url"]), str(facts.get("version") or "")
            backend.draining = facts["state"] == "draining"
            present[name] = backend
        gone = [each for name, each in self.known.items() if name not in present]
        self.known, self.shares = present, shares
        return gone

    async def dismiss(self, gone: list[Backend]) -> None:
        """Close the connections to replicas that are gone, so that their requests go elsewhere.

        A lost node closes no connection: its requests would wait until their timeout. A replica
        whose file is not renewed because a filesystem hangs may still answer.
        """
        for backend in gone:
            if endpoint.replica_file(self.folder, backend.name).exists() and await answers(backend):
                self.known.setdefault(backend.name, backend)
            elif backend.session is not None:
                await backend.session.close()
                backend.session = None

    def choose(self, tried: set[str]) -> Backend | None:
        """Return the least busy replica of a version drawn by its share, None if there is none."""
        usable = [b for b in self.known.values() if not b.draining and b.name not in tried]
        if not usable:
            return None
        # One that has just failed is asked last.
        fresh = [b for b in usable if time.monotonic() - b.failed_at > BEAT_S] or usable
        versions = sorted({b.version for b in fresh})
        weights = [self.shares.get(version, 0.0 if self.shares else 1.0) for version in versions]
        if len(versions) > 1 and sum(weights) > 0:
            (chosen,) = random.choices(versions, weights)
            fresh = [b for b in fresh if b.version == chosen]
        return min(fresh, key=lambda b: (b.in_flight, random.random()))


def connections(backend: Backend) -> aiohttp.ClientSession:
    """Return the session of a backend, which keeps connections open."""
    if backend.session is None:
        kind = aiohttp.UnixConnector if backend.socket else aiohttp.TCPConnector
        place: dict[str, Any] = {"path": backend.socket} if backend.socket else {}
        backend.session = aiohttp.ClientSession(
            # Less than the server's own time, so that none is used that the other side closes.
            connector=kind(limit=0, keepalive_timeout=15, **place),
            auto_decompress=False,
        )
    return backend.session


async def answers(backend: Backend) -> bool:
    """Whether a replica or an engine reports that it is healthy."""
    return await _get(backend, "/health", 5) is not None


async def schema(backend: Backend) -> Any:
    """Return the OpenAPI document of an engine, None if it has none."""
    with suppress(ValueError):
        return json.loads(await _get(backend, "/openapi.json", 20) or "null")
    return None


async def _get(backend: Backend, path: str, timeout_s: float) -> bytes | None:
    """Return what a path answers with status 200, else None."""
    headers = {"Authorization": f"Bearer {backend.key}"} if backend.key else {}
    url, timeout = backend.url + path, aiohttp.ClientTimeout(total=timeout_s)
    with suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with connections(backend).get(url, timeout=timeout, headers=headers) as answer:
            return await answer.read() if answer.status == 200 else None
    return None
