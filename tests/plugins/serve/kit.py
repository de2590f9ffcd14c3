"""A backend that speaks OpenAI's protocol, and the front and the gateway before it."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from plugins.serve import parameters
from plugins.serve.front import Front
from plugins.serve.gateway import Gateway
from plugins.serve.journal import Journal
from plugins.serve.recipe_keys import SERVE
from plugins.serve.upstream import Upstream

KEY = "right-key"
SETTINGS = {key: entry.default for key, entry in SERVE.items()} | {"endpoint": "e", "version": "v1"}
CHAT = "/v1/chat/completions"
SAID = [{"role": "user", "content": "hello"}]


class Backend:
    """Answers all paths, redirects those with a slash at the end as FastAPI does."""

    def __init__(self, *words: str) -> None:
        self.words = words or ("one ", "two")
        self.heard: list[tuple[str, str, Any]] = []
        self.headers: Any = None
        self.status, self.hung_up, self.breaks_off = 200, False, False
        # What an answer, or the end of a stream, waits for.
        self.pause: asyncio.Event | None = None

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.path.endswith("/"):
            raise web.HTTPTemporaryRedirect(request.path.rstrip("/"))
        asked = json.loads(body) if body else None
        self.heard.append((request.method, request.path, asked))
        self.headers = request.headers
        if self.status != 200:
            error = {"object": "error", "message": "the backend's own words", "code": self.status}
            place = {"Location": "http://elsewhere.example/v1"} if self.status < 400 else {}
            return web.json_response(error, status=self.status, headers=place)
        try:
            return await self._answered(request, asked)
        except (ConnectionResetError, asyncio.CancelledError):
            self.hung_up = True
            raise

    async def _answered(self, request: web.Request, asked: Any) -> web.StreamResponse:
        usage = {"prompt_tokens": 3, "completion_tokens": len(self.words)}
        usage["total_tokens"] = sum(usage.values())
        head = {"id": "x", "object": "chat.completion", "created": 1, "model": "/models/m"}
        if not asked.get("stream"):
            await self._paused()
            message = {"role": "assistant", "content": "".join(self.words)}
            choice = {"index": 0, "message": message, "finish_reason": "length"}
            return web.json_response({**head, "choices": [choice], "usage": usage})
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        head["object"] = "chat.completion.chunk"
        for number, word in enumerate(self.words):
            end = "length" if number == len(self.words) - 1 else None
            choice = {"index": 0, "delta": {"content": word}, "finish_reason": end}
            await stream.write(f"data: {json.dumps({**head, 'choices': [choice]})}\n\n".encode())
            if self.breaks_off:
                assert request.transport is not None
                request.transport.abort()
                await asyncio.sleep(0)
        await self._paused()
        if "generation_config" in asked or asked["stream_options"]["include_usage"]:
            last = json.dumps({**head, "choices": [], "usage": usage})
            await stream.write(f"data: {last}\n\n".encode())
        await stream.write(b"data: [DONE]\n\n")
        return stream

    async def _paused(self) -> None:
        if self.pause is not None:
            await self.pause.wait()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        return app


async def when(look: Callable[[], Any], timeout_s: float = 30) -> None:
    """Return once look finds something."""
    async with asyncio.timeout(timeout_s):
        while not look():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def opened(app: web.Application) -> AsyncIterator[str]:
    """Serve an application for as long as the block lasts, at the address that it gets."""
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def client(key: str = KEY) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"})


def front(
    folder: Path,
    check: Callable[[aiohttp.ClientSession, str, Backend], Awaitable[None]],
    *words: str,
    kind: str = "vllm",
    **settings: Any,
) -> None:
    """Run `check(client, url, backend)` on a front, its log in requests, before one backend."""

    async def run(below: str, backend: Backend) -> None:
        upstream, journal = Upstream("a", below, ready=True), Journal(folder / "requests")
        takes = parameters.Parameters(kind, "/models/m")
        made = Front({**SETTINGS, **settings}, KEY, upstream, takes, journal)
        async with opened(made.app()) as url, client() as asking:
            await check(asking, url, backend)

    before_a_backend(run, *words)


def before_a_backend(check: Callable[[str, Backend], Awaitable[None]], *words: str) -> None:
    """Run `check(url, backend)` while a backend is open."""

    async def run() -> None:
        backend = Backend(*words)
        async with opened(backend.app()) as url:
            await check(url, backend)

    asyncio.run(run())


@asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession, str]]:
    """A gateway, a client, and the address of chat completions."""
    proxy = Gateway(SETTINGS, KEY, folder)
    proxy.pool.refresh()
    async with opened(proxy.app()) as url, client() as asking:
        yield proxy, asking, url + CHAT
