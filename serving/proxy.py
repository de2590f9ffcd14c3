"""The HTTP side of a front or a gateway: who may ask, what is passed on, what is logged.

It is aiohttp, as server and as client: one library for both, with a parser in C, and streams that
are passed on chunk by chunk.
"""

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

import aiohttp
from aiohttp import web

from serving.backends import Backend, connections
from serving.journal import Journal
from serving.metrics import Metrics

_ANSWERING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
# What belongs to one connection only.
_HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length"}
_OF_REQUESTS = _HOP | {"accept-encoding", "authorization"}
_OF_ANSWERS = _HOP | {"content-encoding"}
ID = "X-Request-Id"
# A node that is lost refuses no connection, it is only silent.
CONNECT_S = 3


class _BrokenOff(ConnectionResetError):
    """A replica went away when a part of its answer was passed on already."""


class Pool(Protocol):
    """Where requests may go."""

    def choose(self, tried: set[str]) -> Backend | None: ...


class Proxy:
    """Passes requests on to the backends of a pool.

    Args:
        settings: the values of the keys of `entry: serve`.
        key: what a request must bring.
        journal: where requests are logged, None for no log.
        count: how many tokens a text has, None if nobody knows; limit: what the model takes.
        model: the engine's own name of its model, for whatever a request calls it.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        key: str,
        pool: Pool,
        journal: Journal | None = None,
        count: Callable[[str], int] | None = None,
        limit: int | None = None,
        ready: Callable[[], bool] = lambda: True,
        model: str | None = None,
    ) -> None:
        self.settings, self.key, self.pool, self.journal = settings, key, pool, journal
        self.count, self.limit, self.ready, self.model = count, limit, ready, model
        self.metrics = Metrics()
        self._allowed = max(1.0, float(settings.get("rate_per_s") or 0))
        self._refilled = time.monotonic()

    def app(self) -> web.Application:
        """Return the application; its paths are those of OpenAI's protocol, /health, /metrics."""
        app = web.Application(client_max_size=int(self.settings["max_request_bytes"]))
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.show_metrics)
        app.router.add_route("*", "/v1/{path:.*}", self.handle)
        app.on_cleanup.append(self._close)
        return app

    async def _close(self, app: web.Application) -> None:
        for backend in list(getattr(self.pool, "known", {}).values()):
            if backend.session is not None:
                await backend.session.close()

    async def health(self, request: web.Request) -> web.Response:
        ok = self.ready() and self.pool.choose(set()) is not None
        return web.json_response({"status": "ok" if ok else "not ready"}, status=200 if ok else 503)

    async def show_metrics(self, request: web.Request) -> web.Response:
        if not self._may(request):
            return self._refuse(401, _NO_KEY)
        text = self.metrics.text(str(self.settings["endpoint"]))
        return web.Response(text=text, content_type="text/plain")

    def _may(self, request: web.Request) -> bool:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        return hmac.compare_digest(given.encode(), self.key.encode())

    def _refuse(self, status: int, message: str) -> web.Response:
        self.metrics.requests[status] += 1
        headers = {"Retry-After": "1"} if status in (429, 503) else {}
        error = {"error": {"message": message, "type": "cookbook", "code": status}}
        return web.json_response(error, status=status, headers=headers)

    def _over_rate(self) -> bool:
        rate = self.settings.get("rate_per_s")
        if not rate:
            return False
        now = time.monotonic()
        # A second's worth may come at once.
        self._allowed = min(max(1.0, rate), self._allowed + (now - self._refilled) * rate)
        self._refilled = now
        if self._allowed < 1:
            return True
        self._allowed -= 1
        return False

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Pass one request on, or say why not."""
        if not self._may(request):
            return self._refuse(401, _NO_KEY)
        if self.metrics.in_flight >= int(self.settings["max_in_flight"]):
            return self._refuse(503, "too many requests at a time: try again in a moment")
        if self._over_rate():
            words = f"more than {self.settings['rate_per_s']:g} requests per second"
            return self._refuse(429, f"{words}: try again in a moment")
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            limit = int(self.settings["max_request_bytes"])
            return self._refuse(413, f"the request has more than {limit:,} bytes")
        asked: dict[str, Any] = {}
        # A gateway leaves it to the fronts to read what is asked.
        reads = self.journal is not None or self.count is not None or self.model is not None
        if reads and request.path in _ANSWERING:
            try:
                asked = json.loads(body)
                if not isinstance(asked, dict):
                    raise ValueError("it is no object")
            except ValueError as error:
                return self._refuse(400, f"the body is not JSON: {error}")
            if too_long := await self._too_long(asked):
                return self._refuse(400, too_long)
            if self.model is not None:
                body = json.dumps({**asked, "model": self.model}).encode()
        return await self._logged(request, body, asked)

    async def _too_long(self, asked: Mapping[str, Any]) -> str:
        if self.count is None or self.limit is None:
            return ""
        text = json.dumps(asked.get("messages") or asked.get("prompt") or "", ensure_ascii=False)
        # Short of the limit even if each byte were a token.
        if len(text.encode()) <= self.limit:
            return ""
        tokens = await asyncio.to_thread(self.count, _plain(asked))
        if tokens <= self.limit:
            return ""
        return f"the request has {tokens:,} tokens, and the model takes {self.limit:,}: shorten it"

    async def _logged(
        self, request: web.Request, body: bytes, asked: dict[str, Any]
    ) -> web.StreamResponse:
        given = request.headers.get(ID, "")
        request_id = given if 0 < len(given) <= 64 and given.isprintable() else uuid.uuid4().hex
        keep = bool(asked) and self.journal is not None and self.journal.wants(request_id)
        told = _Told(request_id)
        if keep and self.journal is not None:
            self.journal.accepted(_row(request_id, asked, self.settings))
        self.metrics.in_flight += 1
        try:
            return await self._passed_on(request, body, told)
        except asyncio.CancelledError:
            told.status = 499  # the client hung up
            raise
        except (ConnectionResetError, aiohttp.ClientConnectionResetError) as error:
            # 502: the replica went away in the middle of a stream.
            told.status = 502 if isinstance(error, _BrokenOff) else 499
            raise
        finally:
            self.metrics.in_flight -= 1
            row = told.row()
            self._count_up(row, request.path in _ANSWERING)
            if keep and self.journal is not None:
                self.journal.answered(request_id, row)

    def _count_up(self, row: Mapping[str, Any], answers: bool) -> None:
        self.metrics.requests[row["status"]] += 1
        if not answers or row["status"] != 200:
            return
        self.metrics.latency.add(row["latency_s"])
        for kind in ("prompt", "answer"):
            self.metrics.tokens[kind] += row[f"{kind}_tokens"] or 0
        if row["first_token_s"] is not None:
            self.metrics.first_token.add(row["first_token_s"])
            if (row["answer_tokens"] or 0) > 1:
                rest = row["latency_s"] - row["first_token_s"]
                self.metrics.per_token.add(rest / (row["answer_tokens"] - 1))

    async def _passed_on(
        self, request: web.Request, body: bytes, told: "_Told"
    ) -> web.StreamResponse:
        tried: set[str] = set()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _OF_REQUESTS}
        # What an answer says is read here, so it must not be compressed.
        headers |= {ID: told.request_id, "Accept-Encoding": "identity"}
        if request.path in _ANSWERING:
            headers["Content-Type"] = "application/json"
        timeout = aiohttp.ClientTimeout(
            total=float(self.settings["request_timeout_s"]), sock_connect=CONNECT_S
        )
        reason = "no replica is ready"
        while (backend := self.pool.choose(tried)) is not None:
            tried.add(backend.name)
            backend.in_flight += 1
            sent: web.StreamResponse | None = None
            try:
                own = {**headers, "Authorization": f"Bearer {backend.key or self.key}"}
                async with connections(backend).request(
                    request.method,
                    f"{backend.url}{request.path_qs}",
                    data=body or None,
                    headers=own,
                    timeout=timeout,
                ) as answer:
                    if answer.status in (502, 503) and len(tried) < 8:
                        reason = f"a replica answered {answer.status}"
                        continue
                    if answer.content_type != "text/event-stream":
                        # Whole, in one packet; and one that breaks off is asked of another.
                        told.add(await answer.read())
                        sent = web.Response(body=told.parts[-1])
                        await _begin(sent, request, answer, told)
                        await sent.write_eof()
                        return sent
                    sent = await _begin(web.StreamResponse(), request, answer, told)
                    async for chunk in answer.content.iter_any():
                        told.add(chunk)
                        await sent.write(chunk)
                    await sent.write_eof()
                    return sent
            except TimeoutError:
                told.status = 504
                if sent is None:
                    limit = self.settings["request_timeout_s"]
                    return self._answer_of(504, f"no answer within {limit} s")
                raise
            except (aiohttp.ClientError, OSError) as error:
                if isinstance(error, aiohttp.ClientConnectionResetError) or _gone(request):
                    raise
                backend.failed_at = time.monotonic()
                if sent is not None:
                    # A part is sent: the client must see that the rest is missing.
                    with suppress(OSError):
                        if request.transport is not None:
                            request.transport.abort()
                    raise _BrokenOff("the replica went away") from error
                reason = f"a replica does not answer ({type(error).__name__})"
            finally:
                backend.in_flight -= 1
        told.status = 503
        return self._answer_of(503, f"{reason}: see cookbook serve --list")

    def _answer_of(self, status: int, message: str) -> web.Response:
        answer = self._refuse(status, message)
        self.metrics.requests[status] -= 1  # it is counted once the request ends
        return answer


_NO_KEY = "the API key is wrong or missing: send it as Authorization: Bearer KEY"


async def _begin(
    response: web.StreamResponse,
    request: web.Request,
    answer: aiohttp.ClientResponse,
    told: "_Told",
) -> web.StreamResponse:
    """Begin a response with the status and the headers of an answer."""
    response.set_status(answer.status)
    for name, value in answer.headers.items():
        if name.lower() not in _OF_ANSWERS:
            response.headers[name] = value
    response.headers[ID] = told.request_id
    await response.prepare(request)
    told.status = answer.status
    return response


def _gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _plain(asked: Mapping[str, Any]) -> str:
    """Return the text of a request."""
    if asked.get("messages"):
        parts = [m.get("content") for m in asked["messages"] if isinstance(m, dict)]
        return "\n".join(each if isinstance(each, str) else json.dumps(each) for each in parts)
    given = asked.get("prompt")
    return given if isinstance(given, str) else json.dumps(given)


def _row(request_id: str, asked: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    messages = asked.get("messages")
    if messages is None:
        messages = [{"role": "user", "content": _plain(asked)}]
    known = {k: v for k, v in asked.items() if k not in ("messages", "prompt", "input", "model")}
    return {
        "request_id": request_id,
        "time": time.time(),
        "endpoint": settings["endpoint"],
        "model": settings.get("version") or settings["endpoint"],
        "messages": messages,
        "stream": bool(asked.get("stream")),
        "parameters": known,
    }


class _Told:
    """What is learned of an answer while it is passed on."""

    def __init__(self, request_id: str) -> None:
        self.request_id, self.status, self.version = request_id, 0, ""
        self.began = time.perf_counter()
        self.first: float | None = None
        self.parts: list[bytes] = []

    def add(self, chunk: bytes) -> None:
        if self.first is None:
            self.first = time.perf_counter() - self.began
        self.parts.append(chunk)

    def row(self) -> dict[str, Any]:
        text, usage, pieces = _answer(b"".join(self.parts))
        return {
            "answer": text,
            "status": self.status,
            "latency_s": time.perf_counter() - self.began,
            "first_token_s": self.first,
            "prompt_tokens": usage.get("prompt_tokens"),
            "answer_tokens": usage.get("completion_tokens") or pieces or None,
        }


def _answer(body: bytes) -> tuple[str, dict[str, Any], int]:
    """Return the text of an answer, its usage, and of a stream the number of pieces with text."""
    usage: dict[str, Any] = {}
    if not body.lstrip().startswith(b"data:"):
        try:
            value = json.loads(body)
            usage = value.get("usage") or {}
            choice = value["choices"][0]
            text = (choice.get("message") or {}).get("content") or choice.get("text") or ""
            return text, usage, 0
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            return "", usage, 0
    texts = []
    for line in body.decode("utf-8", errors="replace").splitlines():
        if not line.startswith("data:") or line.endswith("[DONE]"):
            continue
        try:
            value = json.loads(line[5:])
            usage = value.get("usage") or usage
            for choice in value.get("choices") or []:
                piece = (choice.get("delta") or {}).get("content") or choice.get("text")
                if piece:
                    texts.append(piece)
        except (ValueError, TypeError, AttributeError):
            continue
    return "".join(texts), usage, len(texts)
