"""The front of a backend: it validates requests, logs them, and passes the answers on."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any

import aiohttp
from aiohttp import web

from plugins.serve.answers import END, Answers, message_of, sse
from plugins.serve.journal import Journal
from plugins.serve.outcome import Outcome
from plugins.serve.parameters import Parameters, Plan
from plugins.serve.proxy import ID, BrokenOff, ClientRequest, Proxy
from plugins.serve.request import BadRequest, parsed, prompts
from plugins.serve.upstream import Upstream
from runspec.files import parse_json


class BackendError(Exception):
    """An error that a backend returned: its status and its message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Front(Proxy):
    """Answers requests by a backend.

    Args:
        parameters: of the backend.
        journal: the log of requests.
    """

    behind_gateway, below = True, "backend"

    def __init__(
        self,
        settings: Mapping[str, Any],
        key: str,
        backend: Upstream,
        parameters: Parameters,
        journal: Journal,
    ) -> None:
        super().__init__(settings, key)
        self.backend, self.parameters, self.journal = backend, parameters, journal

    def upstreams(self) -> Iterable[Upstream]:
        return [self.backend]

    def available(self) -> bool:
        return self.backend.ready

    async def answer(self, request: web.Request, asked: ClientRequest) -> web.StreamResponse:
        """Validate a request, log it, and answer it."""
        try:
            body = parsed(asked.path, asked.body)
            plan = self.parameters.plan(asked.path, body)
        except BadRequest as error:
            return self.error(400, str(error), error.param)
        if self.settings["log"]:
            logged = self.journal.accepted(_row(asked, body, self.settings))
            if not logged and self.settings["log_required"]:
                return self.error(503, "the request cannot be logged: try again in a moment")
        outcome = Outcome()
        try:
            response = await self._answered(request, asked, plan, outcome)
            outcome.status = outcome.status or response.status
        except asyncio.CancelledError:
            outcome.status = 499  # the client hung up
            raise
        except ConnectionResetError as error:
            # 502: the backend went away in the middle of a stream.
            outcome.status = 502 if isinstance(error, BrokenOff) else 499
            raise
        finally:
            self.journal.answered(asked.id, outcome.row())
        if not response.prepared:
            response.headers[ID] = asked.id
        return response

    async def _answered(
        self, request: web.Request, asked: ClientRequest, plan: Plan, outcome: Outcome
    ) -> web.StreamResponse:
        """Ask the backend, and pass its answer on."""
        if not self.backend.ready:
            return self.error(503, "no server is ready: try again in a moment")
        answers = Answers(asked.path, plan, asked.id, self.name, outcome)
        sent = web.StreamResponse(headers={ID: asked.id, "Content-Type": "text/event-stream"})
        sent.headers["Cache-Control"] = "no-cache"
        try:
            async with contextlib.aclosing(self._events(asked, plan)) as events:
                if plan.stream:
                    await self._stream(request, events, answers, sent, outcome)
                    return sent
                value = await anext(events)
            outcome.text_came()
            return web.json_response(
                answers.whole(value), dumps=lambda value: json.dumps(value, ensure_ascii=False)
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
        events: AsyncGenerator[dict[str, Any], None],
        answers: Answers,
        sent: web.StreamResponse,
        outcome: Outcome,
    ) -> None:
        """Send the events of the backend as they come."""
        async for value in events:
            lines = answers.event(value)
            if outcome.pieces:
                outcome.text_came()
            if lines and not sent.prepared:
                await sent.prepare(request)
                outcome.status = 200
            for each in lines:
                await sent.write(sse(each))
        if not sent.prepared:
            raise BackendError(500, "the backend sent an empty answer")
        for each in answers.last():
            await sent.write(sse(each))
        await sent.write(END)
        await sent.write_eof()

    async def _events(
        self, asked: ClientRequest, plan: Plan
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the backend's answer, or the events of its stream.

        Nothing of the client's is passed on unread.
        """
        # A backend that batches tells its requests apart by their ids.
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", ID: asked.id}
        async with self.backend.session.post(
            f"{self.backend.url}{asked.path}",
            data=json.dumps(plan.body, ensure_ascii=False).encode(),
            headers=headers,
            timeout=self.timeout(),
            allow_redirects=False,
        ) as answer:
            if answer.status != 200:
                raise _refused(answer.status, await answer.read())
            if not plan.stream:
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


def _row(
    asked: ClientRequest, body: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    messages = body.get("messages")
    if messages is None:
        texts = [each if isinstance(each, str) else " ".join(map(str, each))
                 for each in prompts(body)]  # fmt: skip
        messages = [{"role": "user", "content": "\n".join(texts)}]
    known = {k: v for k, v in body.items() if k not in ("messages", "prompt", "model")}
    return {
        "request_id": asked.id,
        "time": time.time(),
        "endpoint": settings["endpoint"],
        "model": settings.get("version") or settings["endpoint"],
        "messages": messages,
        "stream": bool(body.get("stream")),
        "parameters": known,
    }
