"""The HTTP side of a gateway, and of a front: who may ask, what is passed on, and where to.

It is aiohttp, as server and as client: one library for both, with a parser in C, and streams that
are passed on chunk by chunk. Nothing but the listed paths passes, and of a request only its body.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import unquote

import aiohttp
from aiohttp import web
from aiohttp.http import HttpProcessingError

from serving.backends import Backend, connections
from serving.keys import OWNER, Keys
from serving.metrics import Metrics
from serving.outcome import Outcome
from serving.request import CHAT, COMPLETIONS, normal

_MODELS = "/v1/models"
_METHODS = {
    "/health": ("GET", "HEAD"),
    "/metrics": ("GET",),
    CHAT: ("POST",),
    COMPLETIONS: ("POST",),
}
# Headers of an answer that are passed on to the client.
_OF_ANSWERS = {"content-type", "retry-after", "x-request-id", "x-client-request-id"}
ID, CLIENT_ID = "X-Request-Id", "X-Client-Request-Id"
# Headers from a gateway to a front, which ignores them from other clients.
_OWN_ID, _OWN_USER = "X-Cookbook-Request-Id", "X-Cookbook-User"
# A lost node does not refuse a connection, it only does not answer.
CONNECT_S = 3
# For how long half a request holds its connection: without all headers, or without all of its body.
# Connections of a client that waits for nothing are closed after the first, too.
HEADERS_S, BODY_S = 30.0, 60.0
_NO_KEY = "the API key is wrong or missing: send it as Authorization: Bearer KEY"


class BrokenOff(ConnectionResetError):
    """A replica went away after a part of its answer was passed on."""


class Pool(Protocol):
    """Where requests may go."""

    def choose(self, tried: set[str]) -> Backend | None: ...


@dataclass(frozen=True)
class Asked:
    """A request that may be passed on; id: the log's own, client_id: the client's."""

    path: str
    body: bytes
    id: str
    client_id: str
    user: str


class Proxy:
    """Passes requests on to the backends of a pool, as they are: the gateway.

    Args:
        settings: the values of the keys of `entry: serve`.
        keys: a request needs one of them.
    """

    body_s = BODY_S
    # Whether requests with the endpoint's own key may come from a gateway, with an id and a user.
    behind_gateway = False

    def __init__(
        self,
        settings: Mapping[str, Any],
        keys: Keys,
        pool: Pool,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self.settings, self.keys, self.pool, self.ready = settings, keys, pool, ready
        self.metrics = Metrics()
        self.started = int(time.time())
        self._allowed = max(1.0, float(settings.get("rate_per_s") or 0))
        self._refilled = time.monotonic()

    def app(self) -> web.Application:
        """Return the application; its paths are those of OpenAI's protocol, /health, /metrics."""
        app = web.Application(client_max_size=int(self.settings["max_request_bytes"]))
        app.router.add_route("*", "/{path:.*}", self.handle)
        app.on_cleanup.append(self._close)
        return app

    async def _close(self, app: web.Application) -> None:
        for backend in list(getattr(self.pool, "known", {}).values()):
            if backend.session is not None:
                await backend.session.close()

    def refuse(
        self, status: int, message: str, param: str | None = None, headers: Any = None
    ) -> web.Response:
        """Return an error in the form of OpenAI's protocol, and count it."""
        self.metrics.requests[status] += 1
        return self.error(status, message, param, headers)

    def error(
        self, status: int, message: str, param: str | None = None, headers: Any = None
    ) -> web.Response:
        """Return an error in the form of OpenAI's protocol, without counting it."""
        known = {"Retry-After": str(self.retry_s())} if status in (429, 503) else {}
        error = {"message": message, "type": _TYPES.get(status, "server_error"), "param": param}
        body = {"error": {**error, "code": status}}
        return web.json_response(body, status=status, headers={**known, **(headers or {})})

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request, or refuse it with the reason."""
        path = normal(unquote(request.rel_url.raw_path))
        if path == "/health" and request.method in _METHODS[path]:
            return self._health()
        user = self.keys.who(_key_of(request))
        if user is None:
            return self.refuse(401, _NO_KEY, headers={"WWW-Authenticate": "Bearer"})
        is_models = path == _MODELS or path.startswith(f"{_MODELS}/")
        methods = ("GET",) if is_models else _METHODS.get(path)
        if methods is None:
            known = ", ".join([CHAT, COMPLETIONS, _MODELS])
            return self.refuse(404, f"there is no {path} here: there are {known}")
        if request.method not in methods:
            message = f"{path} takes {methods[0]}, not {request.method}"
            return self.refuse(405, message, headers={"Allow": ", ".join(methods)})
        if is_models:
            return self._models(path.removeprefix(_MODELS).strip("/"))
        if path == "/metrics":
            if user != OWNER:
                return self.refuse(403, "/metrics is for the endpoint's own key")
            text = self.metrics.text(str(self.settings["endpoint"]))
            return web.Response(text=text, content_type="text/plain")
        return await self._accepted(request, path, user)

    def _health(self) -> web.Response:
        ok = self.ready() and self.available()
        return web.json_response({"status": "ok" if ok else "not ready"}, status=200 if ok else 503)

    def available(self) -> bool:
        """Whether a request would find a backend."""
        return self.pool.choose(set()) is not None

    def _models(self, name: str) -> web.Response:
        own = str(self.settings["endpoint"])
        card = {"id": own, "object": "model", "created": self.started, "owned_by": "cookbook"}
        if not name:
            return web.json_response({"object": "list", "data": [card]})
        if name != own:
            return self.refuse(404, f"there is no model {name!r} here: there is {own}", "model")
        return web.json_response(card)

    def _over_rate(self) -> bool:
        rate = self.settings.get("rate_per_s")
        if not rate:
            return False
        now = time.monotonic()
        # Bursts of one second's requests are allowed.
        self._allowed = min(max(1.0, rate), self._allowed + (now - self._refilled) * rate)
        self._refilled = now
        if self._allowed < 1:
            return True
        self._allowed -= 1
        return False

    def take(self, count: int) -> None:
        """Count an accepted request as so many more; later ones wait for them."""
        self._allowed -= count

    async def _accepted(self, request: web.Request, path: str, user: str) -> web.StreamResponse:
        """Read a request whose path is listed, and pass it on."""
        if self.metrics.in_flight >= int(self.settings["max_in_flight"]):
            return self.refuse(503, "too many requests at a time: try again in a moment")
        if self._over_rate():
            rate = f"{self.settings['rate_per_s']:g} requests per second"
            return self.refuse(429, f"more than {rate}: try again in a moment")
        given = request.headers
        if "websocket" in given.get("Upgrade", "").lower():
            return self.refuse(400, "the connection cannot be upgraded: send a POST with JSON")
        if given.get("Content-Encoding", "identity").lower() not in ("identity", ""):
            return self.refuse(415, "send the body as it is, without Content-Encoding")
        if request.query_string:
            names = ", ".join(sorted(set(request.query)))
            return self.refuse(400, f"{path} takes no query ({names}): put it into the body")
        client_id = given.get(CLIENT_ID) or given.get(ID) or ""
        if len(client_id) > 128 or not (client_id.isascii() and client_id.isprintable()):
            return self.refuse(400, f"{ID} must be at most 128 printable ASCII characters")
        request_id = uuid.uuid4().hex
        if self.behind_gateway and user == OWNER and _OWN_ID in given:
            request_id, user = given[_OWN_ID], given.get(_OWN_USER, OWNER)
        try:
            async with asyncio.timeout(self.body_s):
                body = await request.read()
        except TimeoutError:
            message = f"the body was not complete after {self.body_s:g} s"
            return self.refuse(408, message, headers={"Connection": "close"})
        except web.HTTPRequestEntityTooLarge:
            limit = int(self.settings["max_request_bytes"])
            return self.refuse(413, f"the request has more than {limit:,} bytes")
        except (ValueError, web.HTTPException):
            return self.refuse(400, "the body cannot be read")
        return await self.answer(request, Asked(path, body, request_id, client_id, user))

    async def answer(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        """Answer a request that may be passed on."""
        outcome = Outcome()
        return await self.counted(asked, self._passed_on(request, asked, outcome), outcome, 1)

    async def counted(
        self, asked: Asked, answering: Awaitable[web.StreamResponse], outcome: Outcome, count: int
    ) -> web.StreamResponse:
        """Count a request of so many answers while it is answered, and its outcome."""
        self.metrics.began(count)
        try:
            response = await answering
            outcome.status = outcome.status or response.status
            return response
        except asyncio.CancelledError:
            outcome.status = 499  # the client hung up
            raise
        except (ConnectionResetError, aiohttp.ClientConnectionResetError) as error:
            # 502: the replica went away in the middle of a stream.
            outcome.status = 502 if isinstance(error, BrokenOff) else 499
            raise
        finally:
            self.metrics.in_flight -= count
            row = outcome.row()
            self.metrics.ended(row)
            self.ended(asked, row)

    async def drained(self) -> None:
        """Wait until no request is in flight, at most 20 s."""
        deadline = time.monotonic() + 20
        while self.metrics.in_flight and time.monotonic() < deadline:
            await asyncio.sleep(0.1)

    def ended(self, asked: Asked, row: Mapping[str, Any]) -> None:
        """Called when a request has ended, with the columns of the log."""

    def retry_s(self) -> int:
        """Return after how many seconds a request that was refused may be sent again."""
        return 1

    async def backend(self, tried: set[str]) -> Backend | None:
        """Return where a request goes next, None if there is nothing left to try."""
        return self.pool.choose(tried)

    async def _passed_on(
        self, request: web.Request, asked: Asked, outcome: Outcome
    ) -> web.StreamResponse:
        tried: set[str] = set()
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        headers |= {_OWN_ID: asked.id, _OWN_USER: asked.user}
        headers |= {CLIENT_ID: asked.client_id} if asked.client_id else {}
        reason = "no replica is ready"
        while (backend := await self.backend(tried)) is not None:
            tried.add(backend.name)
            backend.in_flight += 1
            sent: web.StreamResponse | None = None
            try:
                async with connections(backend).post(
                    f"{backend.url}{asked.path}",
                    data=asked.body,
                    headers={**headers, "Authorization": f"Bearer {self.keys.key}"},
                    timeout=self.timeout(),
                    allow_redirects=False,
                ) as answer:
                    if answer.status in (502, 503) and len(tried) < 8:
                        reason = f"a replica answered {answer.status}"
                        continue
                    if 300 <= answer.status < 400:
                        return self.error(502, "a replica answered with a redirect")
                    if answer.content_type != "text/event-stream":
                        # Not streamed: if it breaks off, another replica is asked.
                        body = await answer.read()
                        outcome.raw(body)
                        sent = web.Response(body=body)
                        await begin(sent, request, answer.status, outcome, _known(answer.headers))
                        await sent.write_eof()
                        return sent
                    sent = web.StreamResponse()
                    await begin(sent, request, answer.status, outcome, _known(answer.headers))
                    async for chunk in answer.content.iter_any():
                        outcome.raw(chunk)
                        await sent.write(chunk)
                    await sent.write_eof()
                    return sent
            except TimeoutError:
                outcome.status = 504
                if sent is None:
                    return self.too_late()
                raise
            except (aiohttp.ClientError, OSError) as error:
                if isinstance(error, aiohttp.ClientConnectionResetError) or gone(request):
                    raise
                backend.failed_at = time.monotonic()
                if sent is not None:
                    break_off(request)
                    raise BrokenOff("the replica went away") from error
                reason = f"a replica does not answer ({type(error).__name__})"
            finally:
                backend.in_flight -= 1
        return self.error(503, f"{reason}: see cookbook serve --list")

    def timeout(self) -> aiohttp.ClientTimeout:
        total = float(self.settings["request_timeout_s"])
        return aiohttp.ClientTimeout(total=total, sock_connect=CONNECT_S)

    def too_late(self) -> web.Response:
        return self.error(504, f"no answer within {self.settings['request_timeout_s']} s")


_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_TYPES |= {429: "rate_limit_error"} | dict.fromkeys(
    (400, 405, 408, 413, 415), "invalid_request_error"
)


def runner(proxy: Proxy, headers_s: float = HEADERS_S, **more: Any) -> web.AppRunner:
    """Return aiohttp's server of a proxy, with its limits for strangers."""
    log = logging.getLogger("serving.http")
    log.addFilter(_is_ours)
    return web.AppRunner(
        proxy.app(),
        access_log=None,
        handler_cancellation=True,
        # It begins with the connection, and no part of a request prolongs it.
        keepalive_timeout=headers_s,
        logger=log,
        **more,
    )


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether a fault is none of a malformed request, which is answered with 400: its text has
    parts of the headers, such as keys."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def _key_of(request: web.Request) -> str:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _known(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() in _OF_ANSWERS}


async def begin(
    response: web.StreamResponse,
    request: web.Request,
    status: int,
    outcome: Outcome,
    headers: Mapping[str, str],
) -> None:
    """Begin a response."""
    response.set_status(status)
    response.headers.update(headers)
    await response.prepare(request)
    outcome.status = status


def break_off(request: web.Request) -> None:
    """End a connection: the client must see that the rest of an answer is missing."""
    with suppress(OSError):
        if request.transport is not None:
            request.transport.abort()


def gone(request: web.Request) -> bool:
    """Whether the client has hung up."""
    return request.transport is None or request.transport.is_closing()
