"""The front of an engine: it validates requests, logs them, and composes the engine's answers."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import aiohttp
from aiohttp import web

from runspec.files import parse_json
from serving.answers import END, Answers, message_of, sse
from serving.backends import Backend, connections
from serving.journal import Journal
from serving.keys import OWNER, Charge, Keys, Quotas
from serving.outcome import Outcome
from serving.parameters import Plan, Takes
from serving.proxy import CLIENT_ID, ID, Asked, BrokenOff, Pool, Proxy, begin, break_off, gone
from serving.request import BadRequest, answers, check, parsed, prompts

# Of the requests to an engine for one request of a client, so many at a time: others come between.
_AT_A_TIME = 8


class EngineError(Exception):
    """An error that an engine returned: its status and its message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Front(Proxy):
    """Answers requests by the one engine of its pool.

    Args:
        takes: the parameters of the engine; a function, because a running engine lists its own.
        journal: the log of requests.
        count: counts the tokens of a text; None: a quarter of its bytes are charged.
        limit: the model's context length in tokens.
        quotas: the use of each user today.
    """

    behind_gateway = True

    def __init__(
        self,
        settings: Mapping[str, Any],
        keys: Keys,
        pool: Pool,
        takes: Callable[[], Takes],
        journal: Journal,
        count: Callable[[str], int] | None = None,
        limit: int | None = None,
        ready: Callable[[], bool] = lambda: True,
        quotas: Quotas | None = None,
    ) -> None:
        super().__init__(settings, keys, pool, ready)
        self.takes, self.journal, self.quotas = takes, journal, quotas
        self.count, self.limit = count, limit

    async def answer(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        """Validate a request, charge it, log it, and answer it."""
        # Before it is parsed and counted, which takes time.
        if (over := self._over_quota(asked.user)) is not None:
            return over
        most = int(self.settings["max_answers"])
        try:
            body = parsed(asked.body)
            check(asked.path, body)
            if (count := answers(body)) > most:
                raise BadRequest(
                    f"the request asks for {count:,} answers (prompts times n), and max_answers "
                    f"allows {most:,}: lower n, or send fewer prompts",
                    "n",
                )
            if too_long := await self._too_long(body):
                raise BadRequest(too_long, "prompt" if "prompt" in body else "messages")
            plan = self.takes().plan(asked.path, body)
        except BadRequest as error:
            return self.refuse(error.status, str(error), error.param)
        charge = await self._charge(asked.user, body, count)
        # Again, and from here on without a pause: requests beside it must not pass together.
        if (over := self._over_quota(asked.user, count)) is not None:
            return over
        if self.journal.wants(asked.id):
            logged = self.journal.accepted(_row(asked, body, self.settings))
            self.metrics.unlogged = self.journal.unlogged
            if not logged and self.settings["log_required"]:
                return self.refuse(503, "the request cannot be logged: try again in a moment")
        self.take(count - 1)
        if charge is not None and self.quotas is not None:
            self.quotas.begin(charge)
        outcome = Outcome()
        try:
            composed = self._composed(request, asked, plan, outcome)
            response = await self.counted(asked, composed, outcome, count)
        finally:
            if charge is not None and self.quotas is not None:
                self.quotas.end(charge, *self._spent(charge, plan, outcome))
        if not response.prepared:
            response.headers.update(_ids(asked))
        return response

    def ended(self, asked: Asked, row: Mapping[str, Any]) -> None:
        """Log the outcome of a request."""
        if self.journal.wants(asked.id):
            self.journal.answered(asked.id, row)
            self.metrics.unlogged = self.journal.unlogged

    def _over_quota(self, user: str, requests: int = 1) -> web.Response | None:
        if user == OWNER or self.quotas is None:
            return None
        text, wait_s = self.quotas.over(user, self.keys.users.get(user, {}), requests)
        again = {"Retry-After": str(wait_s)}
        return self.refuse(429, f"{user}: {text}", headers=again) if text else None

    async def _charge(self, user: str, body: Mapping[str, Any], count: int) -> Charge | None:
        """Return what a user is charged for a request when it begins."""
        if user == OWNER or self.quotas is None:
            return None
        texts = _plain(body)
        prompt = sum([await asyncio.to_thread(self._tokens, text) for text in texts])
        most = body.get("max_completion_tokens", body.get("max_tokens", self.takes().length))
        if self.limit is not None:
            most = min(most, max(1, self.limit - prompt // len(texts)))
        return Charge(user, count, prompt, count * most)

    def _tokens(self, text: str) -> int:
        return self.count(text) if self.count is not None else -(-len(text.encode()) // 4)

    def _spent(self, charge: Charge, plan: Plan, outcome: Outcome) -> tuple[int, int]:
        """Return the tokens of the prompts and of the answers of a request that has ended."""
        used = outcome.usage
        if used:
            return int(used.get("prompt_tokens") or 0), int(used.get("completion_tokens") or 0)
        if outcome.status == 499 and not plan.stream:
            # Nobody knows how many were generated.
            return charge.prompt, charge.answer
        if outcome.status in (200, 499, 502, 504):
            written = sum(map(self._tokens, outcome.texts.values()))
            return charge.prompt, max(written, outcome.pieces)
        return 0, 0

    async def _too_long(self, asked: Mapping[str, Any]) -> str:
        if self.count is None or self.limit is None:
            return ""
        for name in ("max_completion_tokens", "max_tokens"):
            if asked.get(name, 0) > self.limit:
                refusal = f"{name} is {asked[name]:,}, and the model takes {self.limit:,} tokens"
                raise BadRequest(f"{refusal} in all: lower it", name)
        for text in _plain(asked):
            # Below the limit even if each byte were a token.
            if len(text.encode()) <= self.limit:
                continue
            tokens = await asyncio.to_thread(self.count, text)
            if tokens > self.limit:
                message = f"the request has {tokens:,} tokens, and the model takes {self.limit:,}"
                return f"{message}: shorten it"
        return ""

    async def _composed(
        self, request: web.Request, asked: Asked, plan: Plan, outcome: Outcome
    ) -> web.StreamResponse:
        """Ask the engine for each body of the plan, and compose one answer."""
        backend = self.pool.choose(set())
        if backend is None:
            return self.error(503, "no replica is ready: try again in a moment")
        answers = Answers(asked.path, plan, asked.id, str(self.settings["endpoint"]))
        asking = _Engine(backend, asked, self.timeout(), backend.key or self.keys.key)
        sent = web.StreamResponse() if plan.stream else None
        try:
            if sent is not None:
                return await self._streamed(request, asked, asking, answers, sent, outcome)
            values = await _all(asking.whole, plan.bodies)
            body = json.dumps(answers.whole(values), ensure_ascii=False).encode()
            outcome.text_came()
            return web.Response(body=body, content_type="application/json")
        except EngineError as error:
            outcome.status = error.status
            if sent is None or not sent.prepared:
                return self.error(error.status, str(error))
            error_event = {"message": str(error), "type": "server_error", "code": error.status}
            await sent.write(sse({"error": error_event}))
            await sent.write_eof()
            return sent
        except TimeoutError:
            outcome.status = 504
            if sent is None or not sent.prepared:
                return self.too_late()
            break_off(request)
            raise BrokenOff("the time of a request is over") from None
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, aiohttp.ClientConnectionResetError) or gone(request):
                raise
            if sent is not None and sent.prepared:
                break_off(request)
                raise BrokenOff("the engine went away") from error
            message = f"the engine does not answer ({type(error).__name__})"
            return self.error(503, message)
        finally:
            outcome.texts, outcome.usage = answers.texts, answers.usage
            outcome.pieces = answers.pieces

    async def _streamed(
        self,
        request: web.Request,
        asked: Asked,
        asking: "_Engine",
        answers: Answers,
        sent: web.StreamResponse,
        outcome: Outcome,
    ) -> web.StreamResponse:
        plan = answers.plan
        streams = [asking.events(k, body) for k, body in enumerate(plan.bodies)]
        async with contextlib.aclosing(_merged(streams)) as events:
            async for number, value in events:
                made = answers.event(number, value)
                if answers.pieces:
                    outcome.text_came()
                if made and not sent.prepared:
                    headers = _ids(asked) | {"Content-Type": "text/event-stream"}
                    await begin(
                        sent, request, 200, outcome, headers | {"Cache-Control": "no-cache"}
                    )
                for each in made:
                    await sent.write(sse(each))
        if not sent.prepared:
            raise EngineError(500, "the engine sent an empty answer")
        for each in answers.last():
            await sent.write(sse(each))
        await sent.write(END)
        await sent.write_eof()
        return sent


class _Engine:
    """Sends one request to an engine; nothing of the client's is passed on unread."""

    def __init__(
        self, backend: Backend, asked: Asked, timeout: aiohttp.ClientTimeout, key: str
    ) -> None:
        self.backend, self.asked, self.timeout = backend, asked, timeout
        self.headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        self.headers |= {"Authorization": f"Bearer {key}"}

    def _post(self, number: int, body: Mapping[str, Any]) -> Any:
        return connections(self.backend).post(
            f"{self.backend.url}{self.asked.path}",
            data=json.dumps(body, ensure_ascii=False).encode(),
            # An engine that batches tells its requests apart by their ids.
            headers={**self.headers, ID: f"{self.asked.id}-{number}" if number else self.asked.id},
            timeout=self.timeout,
            allow_redirects=False,
        )

    async def whole(self, number: int, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return an answer, EngineError if it is an error."""
        async with self._post(number, body) as answer:
            text = await answer.read()
            _check(answer.status, text)
        try:
            value = parse_json(text)
            return {**value, "choices": list(value["choices"])}
        except (ValueError, KeyError, TypeError):
            raise EngineError(502, "the engine's answer is not one of OpenAI's protocol") from None

    async def events(
        self, number: int, body: Mapping[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of a stream."""
        async with self._post(number, body) as answer:
            if answer.status != 200 or answer.content_type != "text/event-stream":
                _check(answer.status, await answer.read())
                raise EngineError(502, "the engine answered a stream with no stream")
            held = b""
            async for chunk in answer.content.iter_any():
                *lines, held = (held + chunk).split(b"\n")
                for line in lines:
                    if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                        continue
                    yield _event(line[5:])


def _event(text: bytes) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError:
        # transformers serve does not quote the message of an error.
        raise EngineError(500, f"the engine failed: {message_of(text)}") from None
    if not isinstance(value, dict) or "error" in value:
        raise EngineError(500, f"the engine failed: {message_of(text)}")
    return value


def _check(status: int, text: bytes) -> None:
    """Raise EngineError for a status that is not 200; a redirect is never passed on."""
    if status == 200:
        return
    message = message_of(text)
    if status == 503 or (400 <= status < 500 and status not in (401, 403, 404, 405)):
        raise EngineError(400 if status == 422 else status, message)
    answer = "answered with a redirect" if 300 <= status < 400 else f"answered {status}: {message}"
    raise EngineError(500 if status >= 500 else 502, f"the engine {answer}")


async def _all(ask: Callable[[int, Any], Awaitable[Any]], bodies: list[Any]) -> list[Any]:
    """Return what is answered to all bodies; if one fails, the others are cancelled."""
    turns = asyncio.Semaphore(_AT_A_TIME)

    async def one(number: int, body: Any) -> Any:
        async with turns:
            return await ask(number, body)

    tasks = [asyncio.ensure_future(one(k, body)) for k, body in enumerate(bodies)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _merged(
    streams: list[AsyncGenerator[dict[str, Any], None]],
) -> AsyncGenerator[tuple[int, dict[str, Any]], None]:
    """Yield the events of several streams as they come, with the number of their stream."""
    if len(streams) == 1:
        async for value in streams[0]:
            yield 0, value
        return
    queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue(64)
    turns = asyncio.Semaphore(_AT_A_TIME)

    async def pump(number: int, stream: AsyncGenerator[dict[str, Any], None]) -> None:
        try:
            async with turns:
                async for value in stream:
                    await queue.put((number, value))
            await queue.put((number, None))
        except Exception as error:
            await queue.put((number, error))

    tasks = [asyncio.ensure_future(pump(k, each)) for k, each in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            number, value = await queue.get()
            if isinstance(value, Exception):
                raise value
            if value is None:
                left -= 1
            else:
                yield number, value
    finally:
        for task in tasks:
            task.cancel()


def _ids(asked: Asked) -> dict[str, str]:
    return {ID: asked.id} | ({CLIENT_ID: asked.client_id} if asked.client_id else {})


def _plain(asked: Mapping[str, Any]) -> list[str]:
    """Return the texts of a request that have to fit into the model's context, one by one."""
    messages = asked.get("messages")
    if messages is None:
        return [each if isinstance(each, str) else " ".join(map(str, each))
                for each in prompts(asked)]  # fmt: skip
    texts = [json.dumps(asked["tools"], ensure_ascii=False)] if asked.get("tools") else []
    for message in messages:
        content = message.get("content") or ""
        parts = [content] if isinstance(content, str) else content
        texts += [each if isinstance(each, str) else each.get("text", "") for each in parts]
        texts += [json.dumps(message["tool_calls"])] if message.get("tool_calls") else []
    return ["\n".join(texts)]


def _row(asked: Asked, body: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    messages = body.get("messages")
    if messages is None:
        messages = [{"role": "user", "content": "\n".join(_plain(body))}]
    known = {k: v for k, v in body.items() if k not in ("messages", "prompt", "model")}
    return {
        "request_id": asked.id,
        "client_id": asked.client_id or None,
        "user": asked.user or None,
        "time": time.time(),
        "endpoint": settings["endpoint"],
        "model": settings.get("version") or settings["endpoint"],
        "messages": messages,
        "stream": bool(body.get("stream")),
        "parameters": known,
    }
