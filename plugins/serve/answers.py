"""Converts a backend's answers for the client: cut at stop strings, whole or streamed."""

import json
from collections.abc import Mapping
from typing import Any

from plugins.serve.outcome import Outcome
from plugins.serve.parameters import Plan
from plugins.serve.request import CHAT
from runspec.files import parse_json


class Cutter:
    """Cuts a text that arrives in pieces at the first stop string."""

    def __init__(self, stops: list[str]) -> None:
        self.stops, self.held, self.cut = stops, "", False

    def feed(self, piece: str) -> str:
        """Return the text to send; a possible beginning of a stop string is held back."""
        if self.cut:
            return ""
        self.held += piece
        ends = [
            (place + len(stop), place)
            for stop in self.stops
            if (place := self.held.find(stop)) >= 0
        ]
        if ends:
            self.cut, sent, self.held = True, self.held[: min(ends)[1]], ""
            return sent
        keep = max((_overlap(self.held, stop) for stop in self.stops), default=0)
        sent, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return sent

    def rest(self) -> str:
        """Return the text that was held back, at the end."""
        rest, self.held = self.held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Return the number of characters at the end of a text that begin a stop string."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class Answers:
    """The answers to one request: what is sent to the client, and what is logged.

    Args:
        name: the model's name for the client.
        outcome: gets the texts and the counts of tokens.
    """

    def __init__(self, path: str, plan: Plan, request_id: str, name: str, outcome: Outcome) -> None:
        self.chat, self.plan, self.name, self.outcome = path == CHAT, plan, name, outcome
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + request_id
        self.created = 0
        self._cutters: dict[int, Cutter] = {}

    def whole(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """Return the client's answer for the backend's."""
        self.outcome.usage = value.get("usage") or {}
        choices = [self._whole_choice({"index": 0, **choice}) for choice in value["choices"]]
        return {**value, "id": self.id, "model": self.name, "choices": choices}

    def _whole_choice(self, choice: dict[str, Any]) -> dict[str, Any]:
        choice = {"logprobs": None, **choice}
        place, field, cutter = choice, "text", Cutter(self.plan.stops)
        if self.chat:
            # The protocol requires these keys; their value may be null.
            place = {"content": None, "refusal": None, **(choice.get("message") or {})}
            choice["message"], field = place, "content"
        if isinstance(place.get(field), str):
            place[field] = cutter.feed(place[field]) + cutter.rest()
        self.outcome.texts[choice["index"]] = place.get(field) or ""
        if cutter.cut:
            choice["finish_reason"] = "stop"
        return choice

    def event(self, value: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the events to send for one event of the backend's stream."""
        self.created = self.created or int(value.get("created") or 0)
        # vLLM may send the usage so far with each event.
        self.outcome.usage = value.get("usage") or self.outcome.usage
        choices = [
            self._choice(int(choice.get("index") or 0), dict(choice))
            for choice in value.get("choices") or []
        ]
        event = {**value, "id": self.id, "model": self.name, "created": self.created}
        event.pop("usage", None)
        return [{**event, "choices": choices}] if choices else []

    def _choice(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        cutter = self._cutters.setdefault(index, Cutter(self.plan.stops))
        delta = dict(choice.get("delta") or {})
        given = delta.get("content") if self.chat else choice.get("text")
        text = cutter.feed(given) if given else ""
        if choice.get("finish_reason") is not None:
            text += cutter.rest()
            if cutter.cut:
                choice["finish_reason"] = "stop"
        if given:
            self.outcome.pieces += 1
        self.outcome.texts[index] = self.outcome.texts.get(index, "") + text
        if text or given:
            delta["content"] = text
        choice_text = {"delta": delta} if self.chat else {"text": text}
        return {"logprobs": None, "finish_reason": None, **choice, "index": index, **choice_text}

    def last(self) -> list[dict[str, Any]]:
        """Return the event with the usage, if it was requested."""
        if not self.plan.usage:
            return []
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.name}
        return [{**head, "choices": [], "usage": self.outcome.usage}]


def sse(value: Any) -> bytes:
    """Return an event of a stream."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


END = b"data: [DONE]\n\n"


def message_of(body: bytes) -> str:
    """Return the message of a backend's error: OpenAI's form, FastAPI's, or its text."""
    text = body.decode("utf-8", errors="replace")
    try:
        value = parse_json(text)
    except ValueError:
        return " ".join(text.split())[:500]
    for key in ("error", "detail", "message"):
        while isinstance(value, dict) and key in value:
            value = value[key]
    return " ".join(str(value).split())[:500]
