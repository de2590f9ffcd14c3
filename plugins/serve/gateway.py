"""One address for an endpoint whose servers come and go: python -m plugins.serve.gateway FOLDER

It reads the files of the servers, spreads requests over those that are ready, and asks another one
if one does not answer. cookbook serve starts it on the login node; it listens on 127.0.0.1.
"""

import argparse
import asyncio
import os
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from plugins.serve.endpoint import ENDPOINT, GATEWAY
from plugins.serve.faults import Faults, stop_event
from plugins.serve.proxy import OWN_ID, ClientRequest, Proxy, runner
from plugins.serve.recipe_keys import SERVE
from plugins.serve.upstream import Pool, Upstream
from runspec import files
from runspec.files import patient_json
from runspec.states import process_start

# How often its file is renewed; plugins.serve.endpoint.STALE_S is several times as long.
_RENEWED_S = 5.0
# Headers of an answer that are passed on to the client.
_OF_ANSWERS = {"content-type", "retry-after", "x-request-id"}


class Gateway(Proxy):
    """Passes requests on to the servers of an endpoint."""

    def __init__(self, settings: Mapping[str, Any], key: str, folder: Path) -> None:
        super().__init__(settings, key)
        self.pool = Pool(folder)

    def upstreams(self) -> Iterable[Upstream]:
        return list(self.pool.known.values())

    def available(self) -> bool:
        return self.pool.choose(set()) is not None

    async def answer(self, request: web.Request, asked: ClientRequest) -> web.StreamResponse:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        headers |= {"Authorization": f"Bearer {self.key}", OWN_ID: asked.id}
        tried: set[str] = set()
        refusal = None
        while (upstream := self.pool.choose(tried)) is not None:
            tried.add(upstream.name)
            upstream.in_flight += 1
            sent: web.StreamResponse | None = None
            try:
                async with upstream.session.post(
                    f"{upstream.url}{asked.path}",
                    data=asked.body,
                    headers=headers,
                    timeout=self.timeout(),
                    allow_redirects=False,
                ) as answer:
                    if answer.status in (502, 503) and len(tried) < 8:
                        refusal = self.error(503, f"a server answered {answer.status}")
                        continue
                    known = {k: v for k, v in answer.headers.items() if k.lower() in _OF_ANSWERS}
                    if answer.content_type != "text/event-stream":
                        # Not streamed: if it breaks off, another server is asked.
                        body = await answer.read()
                        return web.Response(body=body, status=answer.status, headers=known)
                    sent = web.StreamResponse(status=answer.status, headers=known)
                    await sent.prepare(request)
                    async for chunk in answer.content.iter_any():
                        await sent.write(chunk)
                    await sent.write_eof()
                    return sent
            except (aiohttp.ClientError, OSError) as error:
                refusal = self.failed(request, sent, upstream, error)
                if refusal.status == 504:
                    return refusal
            finally:
                upstream.in_flight -= 1
        return refusal or self.error(503, "no server is ready: see cookbook serve --list")


async def run(folder: Path, port: int) -> int:
    """Serve until SIGTERM or SIGINT."""
    faults = Faults()
    faults.allow_descriptors()
    settings: dict[str, Any] = {key: entry.default for key, entry in SERVE.items()}
    settings |= (patient_json(folder / ENDPOINT) or {})["settings"]
    # The fronts of the servers see every request: they log.
    key = Path(settings["key_file"]).read_text(encoding="utf-8").strip()
    gateway = Gateway(settings, key, folder)
    gateway.pool.refresh()
    ended, server = stop_event(), runner(gateway)
    await server.setup()
    try:
        await web.TCPSite(server, "127.0.0.1", port, backlog=1024).start()
    except OSError as error:
        reason = f"port {port} of 127.0.0.1 cannot be opened ({os.strerror(error.errno or 0)})"
        print(f"error: {reason}: leave --port out, or choose another", file=sys.stderr)
        return 1
    url = f"http://127.0.0.1:{server.addresses[0][1]}"
    facts = {"url": url, "pid": os.getpid(), "host": socket.gethostname(), "started": time.time()}
    facts["process_start"] = process_start(os.getpid())
    files.write_json(folder / GATEWAY, {**facts, "time": time.time()}, mode=0o600)
    renewed = time.monotonic()

    def renew() -> None:
        """Renew the gateway's file, whose time is checked."""
        nonlocal renewed
        if time.monotonic() - renewed >= _RENEWED_S and _is_of(folder, facts):
            renewed = time.monotonic()
            files.renew_json(folder / GATEWAY, {**facts, "time": time.time()}, mode=0o600)

    def look() -> None:
        """Read what changes; what cannot be read now stays as it was."""
        faults.trying("the gateway's file", renew)
        faults.trying("the servers' files", gateway.pool.refresh)

    print(f"gateway of {folder.name}: {url}", flush=True)
    while not ended.is_set():
        # In a thread: a shared filesystem may be slow.
        await asyncio.to_thread(look)
        await gateway.pool.dismiss()
        with suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), 0.5)
    await gateway.drained()
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
    parser = argparse.ArgumentParser(prog="python -m plugins.serve.gateway", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    return asyncio.run(run(options.folder, options.port))


if __name__ == "__main__":
    sys.exit(main())
