"""One address for an endpoint whose replicas come and go: python -m serving.gateway FOLDER

It reads the files of the replicas, spreads requests over those that are ready, by the shares of
their versions, and asks another one if one does not answer. cookbook serve starts it on the login
node; it listens on 127.0.0.1.
"""

import argparse
import asyncio
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import web

from runspec import files
from runspec.endpoint import ENDPOINT, GATEWAY
from runspec.keys.serve import SERVE
from runspec.states import process_start
from runspec.storage import patient_json
from serving import backends
from serving.faults import Faults
from serving.keys import Keys
from serving.proxy import Proxy, runner
from serving.scale import Scaler

# How often its file is renewed; runspec.endpoint.STALE_S is several times as long.
_RENEWED_S = 5.0
# Retry-After of requests that are refused while the first replica starts, in seconds.
_COLD_S = 30


class Gateway(Proxy):
    """Passes requests on; if replicas follow the load, a request waits for the first of them."""

    def __init__(
        self, settings: dict[str, Any], keys: Keys, pool: backends.Pool, scaler: Scaler
    ) -> None:
        super().__init__(settings, keys, pool)
        self.scaler = scaler

    def available(self) -> bool:
        return bool(self.scaler.wanted) or super().available()

    def retry_s(self) -> int:
        return _COLD_S if self.scaler.wanted and not super().available() else super().retry_s()

    async def backend(self, tried: set[str]) -> backends.Backend | None:
        backend = self.pool.choose(tried)
        if not self.scaler.wanted:
            return backend
        deadline = time.monotonic() + float(self.settings["cold_start_s"])
        while backend is None and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
            backend = self.pool.choose(tried)
        return backend


async def run(folder: Path, port: int, host: str) -> int:
    """Serve until SIGTERM or SIGINT."""
    faults = Faults()
    faults.allow_descriptors()
    settings: dict[str, Any] = {key: entry.default for key, entry in SERVE.items()}
    settings |= (patient_json(folder / ENDPOINT) or {})["settings"]
    # The fronts of the replicas see every request: they log.
    keys = Keys(Path(settings["key_file"]).read_text(encoding="utf-8").strip(), folder)
    pool = backends.Pool(folder)
    pool.refresh()
    ended = backends.stop_event()
    idle_s = 60 * float(settings["scale_idle_minutes"])
    scaler = Scaler(folder, int(settings["scale_in_flight"]), idle_s)
    proxy = Gateway(settings, keys, pool, scaler)
    server = runner(proxy)
    await server.setup()
    try:
        await web.TCPSite(server, host, port, backlog=1024).start()
    except OSError as error:
        reason = f"port {port} of {host} cannot be opened ({os.strerror(error.errno or 0)})"
        print(f"error: {reason}: leave --port out, or choose another", file=sys.stderr)
        return 1
    url = f"http://{host}:{server.addresses[0][1]}"
    facts = {"url": url, "pid": os.getpid(), "host": socket.gethostname(), "started": time.time()}
    facts["process_start"] = process_start(os.getpid())

    files.write_json(folder / GATEWAY, {**facts, "time": time.time()}, mode=0o600)
    renewed, gone = time.monotonic(), []

    def renew() -> None:
        """Renew the gateway's file, whose time is checked."""
        nonlocal renewed
        if time.monotonic() - renewed >= _RENEWED_S and _is_of(folder, facts):
            renewed = time.monotonic()
            files.renew_json(folder / GATEWAY, {**facts, "time": time.time()}, mode=0o600)

    def look() -> None:
        """Read what changes; what cannot be read now stays as it was."""
        faults.watch_descriptors()
        faults.trying("the gateway's file", renew)
        faults.trying("the users' keys", keys.refresh)
        faults.trying("the replicas' files", lambda: gone.extend(pool.refresh()))

    print(f"gateway of {folder.name}: {url}", flush=True)
    while not ended.is_set():
        # In a thread: a shared filesystem may be slow.
        await asyncio.to_thread(look)
        await pool.dismiss(gone)
        gone.clear()
        await scaler.look(proxy.metrics.in_flight, proxy.metrics.take_peak())
        try:
            await asyncio.wait_for(ended.wait(), 0.5)
        except TimeoutError:
            continue
    await proxy.drained()
    await server.cleanup()
    if _is_of(folder, facts):
        with suppress(OSError):
            (folder / GATEWAY).unlink()
    return 0


def _is_of(folder: Path, facts: dict[str, Any]) -> bool:
    """Whether gateway.json is this gateway's, and not that of a newer one."""
    content = files.peek(folder / GATEWAY)
    return all(content.get(key) == facts[key] for key in ("host", "started"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m serving.gateway", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--host", default="127.0.0.1")
    options = parser.parse_args()
    return asyncio.run(run(options.folder, options.port, options.host))


if __name__ == "__main__":
    sys.exit(main())
