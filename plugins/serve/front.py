"""The front of a backend: it validates requests, logs them, and composes the backend's answers."""

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Any

import aiohttp
from aiohttp import web

from plugins.serve.answers import END, Answers, message_of, sse
from plugins.serve.journal import Journal
from plugins.serve.keys import OWNER, Charge, Keys, Quotas
from plugins.serve.outcome import Outcome
from plugins.serve.parameters import Parameters, Plan
from plugins.serve.proxy import CLIENT_ID, ID, ClientRequest, Proxy
from plugins.serve.request import BadRequest, answers, parsed, prompts
from plugins.serve.upstream import Upstream
from runspec.files import parse_json

# Most requests to a backend at once for one request of a client: others come between.
_AT_A_TIME = 8


class BackendError(Exception):
    """An error that a backend returned: its status and its message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Front(Proxy):
    """Answers requests by a backend.

    Args:
        parameters: of the backend; replaced when it runs and lists its own.
        journal: the log of requests.
        quotas: the use of each user today.
        count: counts the tokens of a text; by default about, where no tokenizer is known.
        limit: the model's context length in tokens, infinite if it is not known.
    """

    behind_gateway, below = True, "backend"

    def __init__(
        self,
        settings: Mapping[str, Any],
        keys: Keys,
        backend: Upstream,
        parameters: Parameters,
        journal: Journal,
        quotas: Quotas,
        count: Callable[[str], int] = lambda text: -(-len(text.encode()) // 4),
        limit: float = math.inf,
    ) -> None:
        super().__init__(settings, keys)
        self.backend, self.parameters = backend, parameters
        self.journal, self.quotas = journal, quotas
        self.count, self.limit = count, limit

    def upstreams(self) -> Iterable[Upstream]:
        return [self.backend]

    def available(self) -> bool:
        return self.backend.ready

    @property
    def unlogged(self) -> int:
        return self.journal.unlogged

    async def answer(self, request: web.Request, asked: ClientRequest) -> web.StreamResponse:
        """Validate a request, charge it, log it, and answer it."""
        # Before it is parsed and counted, which takes time.
        if (over := self._over_quota(asked.user)) is not None:
            return over
        most = int(self.settings["max_answers"])
        try:
            body = parsed(asked.path, asked.body)
            plan = self.parameters.plan(asked.path, body)
            if (count := answers(body)) > most:
                raise BadRequest(
                    f"the request asks for {count:,} answers (prompts times n), and max_answers "
                    f"allows {most:,}: lower n, or send fewer prompts",
                    "n",
                )
            charge = await self._charge(asked.user, body, count)
        except BadRequest as error:
            return self.error(400, str(error), error.param)
        # Again, and from here on without a pause: requests beside it must not pass together.
        if (over := self._over_quota(asked.user, count)) is not None:
            return over
        if self.journal.wants(asked.id):
            logged = self.journal.accepted(_row(asked, body, self.settings))
            if not logged and self.settings["log_required"]:
                return self.error(503, "the request cannot be logged: try again in a moment")
        self.take(count - 1)
        self.quotas.begin(charge)
        outcome = Outcome()
        try:
            composed = self._composed(request, asked, plan, outcome)
            response = await self.counted(composed, outcome, count)
        finally:
            self.quotas.end(charge, *self._spent(charge, plan, outcome))
            self.journal.answered(asked.id, outcome.row())
        if not response.prepared:
            response.headers.update(_ids(asked))
        return response

    def _over_quota(self, user: str, requests: int = 1) -> web.Response | None:
        text, wait_s = self.quotas.over(user, self.keys.users.get(user, {}), requests)
        again = {"Retry-After": str(wait_s)}
        return self.error(429, f"{user}: {text}", headers=again) if text else None

    async def _charge(self, user: str, asked: Mapping[str, Any], answers: int) -> Charge:
        """Return what a user is charged for a request when it begins.

        Raises:
            BadRequest: the request is longer than the model takes.
        """
        for name in ("max_completion_tokens", "max_tokens"):
            if asked.get(name, 0) > self.limit:
                refusal = f"{name} is {asked[name]:,}, and the model takes {self.limit:,} tokens"
                raise BadRequest(f"{refusal} in all: lower it", name)
        texts, prompt = _plain(asked), 0
        for text in texts:
            # Even if each byte were a token; a user is charged what it really has.
            tokens = len(text.encode())
            if tokens > self.limit or user != OWNER:
                tokens = await asyncio.to_thread(self.count, text)
            if tokens > self.limit:
                message = f"the request has {tokens:,} tokens, and the model takes {self.limit:,}"
                place = "prompt" if "prompt" in asked else "messages"
                raise BadRequest(f"{message}: shorten it", place)
            prompt += tokens
        length = asked.get("max_completion_tokens", asked.get("max_tokens", self.parameters.length))
        answer = min(length, max(1, self.limit - prompt // len(texts)))
        return Charge(user, answers, prompt, answers * int(answer))

    def _spent(self, charge: Charge, plan: Plan, outcome: Outcome) -> tuple[int, int]:
        """Return the tokens of the prompts and of the answers of a request that has ended."""
        used = outcome.usage
        if used:
            return int(used.get("prompt_tokens") or 0), int(used.get("completion_tokens") or 0)
        if outcome.status == 499 and not plan.stream:
            # Nobody knows how many were generated.
            return charge.prompt, charge.answer
        if outcome.status in (200, 499, 502, 504):
            written = sum(map(self.count, outcome.texts.values()))
            return charge.prompt, max(written, outcome.pieces)
        return 0, 0

    async def _composed(
        self, request: web.Request, asked: ClientRequest, plan: Plan, outcome: Outcome
    ) -> web.StreamResponse:
        """Ask the backend for each body of the plan, and compose one answer."""
        if not self.backend.ready:
            return self.error(503, "no server is ready: try again in a moment")
        composed = Answers(asked.path, plan, asked.id, self.name, outcome)
        sent = web.StreamResponse(headers={**_ids(asked), "Content-Type": "text/event-stream"})
        sent.headers["Cache-Control"] = "no-cache"
        try:
            async with contextlib.aclosing(self._told(asked, plan)) as told:
                if plan.stream:
                    await self._stream(request, told, composed, sent, outcome)
                    return sent
                values = {number: value async for number, value in told}
            outcome.text_came()
            return web.json_response(
                composed.whole([values[number] for number in sorted(values)]),
                dumps=lambda value: json.dumps(value, ensure_ascii=False),
            )
        except BackendError as error:
            outcome.status = error.status
            if not sent.prepared:
                return self.error(error.status, str(error))
            event = {"message": str(error), "type": "server_error", "code": error.status}
            await sent.write(sse({"error": event}))
            await sent.write_eof()
            return sent
        except (aiohttp.ClientError, OSError) as error:
            return self.failed(request, sent, self.backend, error)

    async def _stream(
        self,
        request: web.Request,
        told: AsyncGenerator[tuple[int, dict[str, Any]], None],
        composed: Answers,
        sent: web.StreamResponse,
        outcome: Outcome,
    ) -> None:
        """Send the events of the backend as they come."""
        async for number, value in told:
            events = composed.event(number, value)
            if outcome.pieces:
                outcome.text_came()
            if events and not sent.prepared:
                await sent.prepare(request)
                outcome.status = 200
            for each in events:
                await sent.write(sse(each))
        if not sent.prepared:
            raise BackendError(500, "the backend sent an empty answer")
        for each in composed.last():
            await sent.write(sse(each))
        await sent.write(END)
        await sent.write_eof()

    async def _told(
        self, asked: ClientRequest, plan: Plan
    ) -> AsyncGenerator[tuple[int, dict[str, Any]], None]:
        """Yield what the backend answers to the bodies of a plan as it comes, each with its number.

        If one fails, the others are cancelled.
        """
        queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue(64)
        turns = asyncio.Semaphore(_AT_A_TIME)

        async def ask(number: int, body: Mapping[str, Any]) -> None:
            try:
                async with turns:
                    async for value in self._asked(asked, number, body, plan.stream):
                        await queue.put((number, value))
                await queue.put((number, None))
            except Exception as error:
                await queue.put((number, error))

        tasks = [asyncio.ensure_future(ask(*each)) for each in enumerate(plan.bodies)]
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

    async def _asked(
        self, asked: ClientRequest, number: int, body: Mapping[str, Any], stream: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the backend's answer to one body, or the events of its stream.

        Nothing of the client's is passed on unread.
        """
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        headers |= {"Authorization": f"Bearer {self.backend.key or self.keys.key}"}
        # A backend that batches tells its requests apart by their ids.
        headers[ID] = f"{asked.id}-{number}" if number else asked.id
        async with self.backend.session.post(
            f"{self.backend.url}{asked.path}",
            data=json.dumps(body, ensure_ascii=False).encode(),
            headers=headers,
            timeout=self.timeout(),
            allow_redirects=False,
        ) as answer:
            if answer.status != 200:
                raise _refused(answer.status, await answer.read())
            if not stream:
                yield _value(await answer.read())
                return
            if answer.content_type != "text/event-stream":
                raise BackendError(502, "the backend answered a stream with no stream")
            held = b""
            async for chunk in answer.content.iter_any():
                *lines, held = (held + chunk).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                        yield _event(line[5:])


def _value(text: bytes) -> dict[str, Any]:
    try:
        value = parse_json(text)
        return {**value, "choices": list(value["choices"])}
    except (ValueError, KeyError, TypeError):
        raise BackendError(502, "the backend's answer is not one of OpenAI's protocol") from None


def _event(text: bytes) -> dict[str, Any]:
    # transformers serve does not quote the message of an error.
    with contextlib.suppress(ValueError):
        value = parse_json(text)
        if isinstance(value, dict) and "error" not in value:
            return value
    raise BackendError(500, f"the backend failed: {message_of(text)}")


def _refused(status: int, text: bytes) -> BackendError:
    """Return the error for a status that is not 200; a redirect is never passed on."""
    message = message_of(text)
    if status == 503 or (400 <= status < 500 and status not in (401, 403, 404, 405)):
        return BackendError(400 if status == 422 else status, message)
    answer = "answered with a redirect" if 300 <= status < 400 else f"answered {status}: {message}"
    return BackendError(500 if status >= 500 else 502, f"the backend {answer}")


def _ids(asked: ClientRequest) -> dict[str, str]:
    return {ID: asked.id} | ({CLIENT_ID: asked.client_id} if asked.client_id else {})


def _plain(asked: Mapping[str, Any]) -> list[str]:
    """Return the texts of a request that have to fit into the model's context, one by one."""
    if "prompt" in asked:
        return [each if isinstance(each, str) else " ".join(map(str, each))
                for each in prompts(asked)]  # fmt: skip
    texts = [json.dumps(asked["tools"], ensure_ascii=False)] if asked.get("tools") else []
    for message in asked["messages"]:
        content = message.get("content") or ""
        parts = [content] if isinstance(content, str) else content
        texts += [each if isinstance(each, str) else each.get("text") or "" for each in parts]
        texts += [json.dumps(message["tool_calls"])] if message.get("tool_calls") else []
    return ["\n".join(texts)]


def _row(
    asked: ClientRequest, body: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    messages = body.get("messages") or [{"role": "user", "content": "\n".join(_plain(body))}]
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
