"""The HTTP side of a gateway, and of a front: who may ask, and what is let through.

It is aiohttp, as server and as client: one library for both, with a parser in C, and streams that
are passed on chunk by chunk. Nothing but the listed paths passes, and of a request only its body.
"""

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.http import HttpProcessingError

from plugins.serve.request import CHAT, COMPLETIONS
from plugins.serve.upstream import Upstream

_MODELS = "/v1/models"
# Of an answer: its row in the log.
ID = "X-Request-Id"
# The id that a gateway gives a request, which it may send to several fronts.
OWN_ID = "X-Cookbook-Request-Id"
# A lost node does not refuse a connection, it only does not answer.
CONNECT_S = 3
# For how long half a request holds its connection: without all headers, or without all of its body.
# Connections of a client that waits for nothing are closed after the first, too.
HEADERS_S, BODY_S = 30.0, 60.0
_NO_KEY = "the API key is wrong or missing: send it as Authorization: Bearer KEY"
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_TYPES |= dict.fromkeys((400, 405, 408, 413, 415), "invalid_request_error")


class BrokenOff(ConnectionResetError):
    """A server or a backend went away after a part of its answer was passed on."""


@dataclass(frozen=True)
class ClientRequest:
    """A request that may be passed on."""

    path: str
    body: bytes
    # Its row in the log.
    id: str


class Proxy:
    """What a gateway and a front have in common.

    Args:
        settings: the values of the keys of `entry: serve`.
        key: the endpoint's API key.
    """

    body_s = BODY_S
    # Whether requests may come from a gateway, with an id.
    behind_gateway = False
    # What answers what is let through.
    below = "server"

    def __init__(self, settings: Mapping[str, Any], key: str) -> None:
        self.settings, self.key = settings, key
        self.name = str(settings["endpoint"])
        self.started = int(time.time())
        # The requests that are being answered.
        self.in_flight = 0

    def upstreams(self) -> Iterable[Upstream]:
        """Return where requests go."""
        raise NotImplementedError

    def available(self) -> bool:
        """Whether a request would be answered."""
        raise NotImplementedError

    async def answer(self, request: web.Request, asked: ClientRequest) -> web.StreamResponse:
        """Answer a request that may be passed on."""
        raise NotImplementedError

    def app(self) -> web.Application:
        """Return the application; its paths are those of OpenAI's protocol, and /health."""

        @web.middleware
        async def guarded(request: web.Request, handler: Any) -> web.StreamResponse:
            return await self._guarded(request, handler)

        app = web.Application(
            client_max_size=int(self.settings["max_request_bytes"]), middlewares=[guarded]
        )
        for path, handler in (
            ("/health", self._health),
            (_MODELS, self._models),
            (f"{_MODELS}/{{name}}", self._models),
        ):
            app.router.add_get(path, handler)
        for path in (CHAT, COMPLETIONS):
            app.router.add_post(path, self._accepted)
        app.on_cleanup.append(self._close)
        return app

    async def _close(self, app: web.Application) -> None:
        for upstream in self.upstreams():
            await upstream.close()

    def error(
        self, status: int, message: str, param: str | None = None, headers: Any = None
    ) -> web.Response:
        """Return an error in the form of OpenAI's protocol."""
        known = {"Retry-After": "1"} if status in (429, 503) else {}
        error = {"message": message, "type": _TYPES.get(status, "server_error"), "param": param}
        body = {"error": {**error, "code": status}}
        return web.json_response(body, status=status, headers={**known, **(headers or {})})

    def _has_key(self, request: web.Request) -> bool:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        # A header may hold any bytes.
        key = given.strip().encode("utf-8", "surrogateescape")
        return scheme.lower() == "bearer" and hmac.compare_digest(key, self.key.encode())

    async def _guarded(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Let a handler answer whoever may ask; tell in the protocol's form what is not there."""
        path = request.path
        try:
            if path != "/health" and not self._has_key(request):
                return self.error(401, _NO_KEY, headers={"WWW-Authenticate": "Bearer"})
            answer: web.StreamResponse = await handler(request)
            return answer
        except web.HTTPNotFound:
            known = ", ".join([CHAT, COMPLETIONS, _MODELS])
            return self.error(404, f"there is no {path} here: there are {known}")
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            message = f"{path} takes {allowed}, not {request.method}"
            return self.error(405, message, headers={"Allow": allowed})

    async def _health(self, request: web.Request) -> web.Response:
        ok = self.available()
        return web.json_response({"status": "ok" if ok else "not ready"}, status=200 if ok else 503)

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": self.name, "object": "model", "created": self.started}
        card["owned_by"] = "cookbook"
        asked = request.match_info.get("name")
        if asked is None:
            return web.json_response({"object": "list", "data": [card]})
        if asked != self.name:
            message = f"there is no model {asked!r} here: there is {self.name}"
            return self.error(404, message, "model")
        return web.json_response(card)

    async def _accepted(self, request: web.Request) -> web.StreamResponse:
        """Read a request whose path is listed, and answer it."""
        given, path = request.headers, request.path
        if self.in_flight >= int(self.settings["max_in_flight"]):
            return self.error(503, "too many requests at a time: try again in a moment")
        if request.query_string:
            names = ", ".join(sorted(set(request.query)))
            return self.error(400, f"{path} takes no query ({names}): put it into the body")
        request_id = uuid.uuid4().hex
        if self.behind_gateway:
            request_id = given.get(OWN_ID, request_id)
        try:
            async with asyncio.timeout(self.body_s):
                body = await request.read()
        except TimeoutError:
            message = f"the body was not complete after {self.body_s:g} s"
            return self.error(408, message, headers={"Connection": "close"})
        except web.HTTPRequestEntityTooLarge:
            limit = int(self.settings["max_request_bytes"])
            return self.error(413, f"the request has more than {limit:,} bytes")
        except (ValueError, web.RequestPayloadError, web.HTTPException):
            return self.error(400, "the body cannot be read")
        self.in_flight += 1
        try:
            return await self.answer(request, ClientRequest(path, body, request_id))
        finally:
            self.in_flight -= 1

    def failed(
        self, request: web.Request, sent: web.StreamResponse | None, upstream: Upstream, error: Any
    ) -> web.Response:
        """Return the answer to a request that a server or a backend has not answered.

        Raises:
            ConnectionResetError: the client is gone, or has got a part of the answer already.
        """
        if (
            request.transport is None
            or request.transport.is_closing()
            or isinstance(error, aiohttp.ClientConnectionResetError)
        ):
            raise ConnectionResetError("the client went away") from error
        upstream.failed_at = time.monotonic()
        if sent is not None and sent.prepared:
            # The client must see that the rest is missing.
            with suppress(OSError):
                request.transport.abort()
            raise BrokenOff(f"the {self.below} went away") from error
        if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ServerTimeoutError):
            return self.error(504, f"no answer within {self.settings['request_timeout_s']} s")
        return self.error(503, f"the {self.below} does not answer ({type(error).__name__})")

    def timeout(self) -> aiohttp.ClientTimeout:
        total = float(self.settings["request_timeout_s"])
        return aiohttp.ClientTimeout(total=total, sock_connect=CONNECT_S)

    async def drained(self) -> None:
        """Wait until no request is in flight, at most 20 s."""
        deadline = time.monotonic() + 20
        while self.in_flight and time.monotonic() < deadline:
            await asyncio.sleep(0.1)


def runner(proxy: Proxy, headers_s: float = HEADERS_S, **more: Any) -> web.AppRunner:
    """Return aiohttp's server of a proxy, with its limits for strangers."""
    log = logging.getLogger("serve.http")
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
