"""What the front and the gateway of a served model add: python benchmarks/gateway.py

A server that answers at once stands for the backend, in a process of its own; so do the front (key,
log) and the gateway. Requests go to each in turn, so that the busy machine is the same for
all. Then so many streams are held at the same time through both.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from plugins.serve import endpoint as endpoints  # noqa: E402
from plugins.serve import parameters  # noqa: E402
from plugins.serve.front import Front  # noqa: E402
from plugins.serve.gateway import Gateway  # noqa: E402
from plugins.serve.journal import Journal, read  # noqa: E402
from plugins.serve.recipe_keys import SERVE  # noqa: E402
from plugins.serve.upstream import Upstream  # noqa: E402

KEY = "key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
BODY = {"model": "m", "messages": [{"role": "user", "content": "My order has not arrived"}]}
SETTINGS: dict[str, Any] = {key: entry.default for key, entry in SERVE.items()}
SETTINGS |= {"endpoint": "e", "version": "v", "max_in_flight": 2000}
PIECES, PAUSE_S = 20, 0.25


async def answer(request: web.Request) -> web.StreamResponse:
    """Answer at once, or as a stream of pieces with pauses."""
    body = await request.json()
    if not body.get("stream"):
        usage = {"prompt_tokens": 5, "completion_tokens": 5}
        message = {"role": "assistant", "content": "It is on its way."}
        return web.json_response({"choices": [{"message": message}], "usage": usage})
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await stream.prepare(request)
    for _ in range(PIECES):
        await stream.write(b'data: {"choices": [{"delta": {"content": "word "}}]}\n\n')
        await asyncio.sleep(PAUSE_S)
    await stream.write(b"data: [DONE]\n\n")
    return stream


def serve(kind: str, folder: str, below: str, told: Any) -> None:
    """Run one of the three servers until the process is ended."""

    async def run() -> None:
        if kind == "backend":
            app = web.Application()
            app.router.add_post("/v1/chat/completions", answer)
        elif kind == "front":
            journal = Journal(Path(folder) / "requests")
            takes = parameters.Parameters("vllm", "m")
            app = Front(SETTINGS, KEY, Upstream("a", below, ready=True), takes, journal).app()
        else:
            proxy = Gateway(SETTINGS, KEY, Path(folder))
            proxy.pool.refresh()
            app = proxy.app()
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        told.put(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await asyncio.Event().wait()

    asyncio.run(run())


async def one(client: aiohttp.ClientSession, url: str, stream: bool = False) -> float:
    began = time.perf_counter()
    body = {**BODY, "stream": stream}
    async with client.post(f"{url}/v1/chat/completions", json=body, headers=HEADERS) as found:
        text = await found.read()
        assert found.status == 200 and (not stream or text.endswith(b"[DONE]\n\n")), text[-200:]
    return time.perf_counter() - began


def at(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process, its threads' included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(
    urls: dict[str, str], pids: dict[str, int], requests: int, streams: int
) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in urls}
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout
    ) as client:
        for url in urls.values():
            for _ in range(50):
                await one(client, url)
        before = {name: cpu_s(pid) for name, pid in pids.items()}
        for _ in range(requests):
            for name, url in urls.items():
                seconds[name].append(await one(client, url))
        used = {name: cpu_s(pid) - before[name] for name, pid in pids.items()}
        began = time.perf_counter()
        held = await asyncio.gather(
            *(one(client, urls["gateway"], stream=True) for _ in range(streams)),
            return_exceptions=True,
        )
        took = time.perf_counter() - began
    base = seconds["backend"]
    found: dict[str, Any] = {"requests": requests}
    for name in ("front", "gateway"):
        found[name] = {
            f"p{int(100 * q)}_added_ms": round(1000 * (at(seconds[name], q) - at(base, q)), 3)
            for q in (0.5, 0.99)
        }
    # Each round asks the backend three times, the front twice and the gateway once.
    shares = {"backend": 3, "front": 2, "gateway": 1}
    found["cpu_ms_per_request"] = {
        name: round(1000 * used[name] / requests / count, 3) for name, count in shares.items()
    }
    failed = [each for each in held if isinstance(each, BaseException)]
    found["streams"] = {"held": streams, "failed": len(failed), "seconds": round(took, 1)}
    found["streams"]["seconds_without_load"] = PIECES * PAUSE_S
    if failed:
        found["streams"]["first"] = repr(failed[0])[:200]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=500)
    options = parser.parse_args()
    told: Any = multiprocessing.Queue()
    processes, urls, below = [], {}, ""
    with tempfile.TemporaryDirectory() as folder:
        try:
            for kind in ("backend", "front", "gateway"):
                if kind == "gateway":
                    facts = {"state": "ready", "url": urls["front"], "version": "v"}
                    endpoints.tell(Path(folder), "a", facts)
                process = multiprocessing.Process(target=serve, args=(kind, folder, below, told))
                process.start()
                processes.append(process)
                urls[kind] = below = told.get(timeout=60)
            pids = dict(zip(urls, (each.pid or 0 for each in processes), strict=True))
            found = asyncio.run(measure(urls, pids, options.requests, options.streams))
            logged = sum(row["status"] == 200 for row in read(Path(folder) / "requests"))
            found["logged"] = logged
        finally:
            for process in processes:
                process.terminate()
                process.join()
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
