"""The outcome of a request, collected while its answer is passed on: text, tokens, times."""

import time
from typing import Any

from runspec.files import parse_json


class Outcome:
    """The outcome of one request."""

    def __init__(self) -> None:
        self.status = 0
        self.began = time.perf_counter()
        self.first: float | None = None
        self.texts: dict[int, str] = {}
        self.usage: dict[str, Any] = {}
        self.pieces = 0
        self._parts: list[bytes] = []

    def text_came(self) -> None:
        """Note the time of the first text."""
        if self.first is None:
            self.first = time.perf_counter() - self.began

    def raw(self, chunk: bytes) -> None:
        """Keep a part of an answer that is passed on unread."""
        self.text_came()
        self._parts.append(chunk)

    def row(self) -> dict[str, Any]:
        """Return the columns of the log."""
        if self._parts:
            self.texts, self.usage, self.pieces = _answer(b"".join(self._parts))
        texts = [self.texts[index] for index in sorted(self.texts)]
        return {
            "answer": texts[0] if texts else "",
            "answers": texts if len(texts) > 1 else None,
            "status": self.status,
            "latency_s": time.perf_counter() - self.began,
            "first_token_s": self.first,
            "prompt_tokens": self.usage.get("prompt_tokens"),
            "answer_tokens": self.usage.get("completion_tokens") or self.pieces or None,
        }


def _answer(body: bytes) -> tuple[dict[int, str], dict[str, Any], int]:
    """Return the texts of an answer, its usage, and of a stream the number of pieces with text."""
    texts: dict[int, str] = {}
    usage: dict[str, Any] = {}
    pieces = 0
    streamed = body.lstrip().startswith((b"data:", b":"))
    lines = (
        body.decode("utf-8", errors="replace").splitlines()
        if streamed
        else [body.decode("utf-8", errors="replace")]
    )
    for line in lines:
        if streamed and (not line.startswith("data:") or line.endswith("[DONE]")):
            continue
        try:
            value = parse_json(line.removeprefix("data:"))
            usage = value.get("usage") or usage
            for choice in value.get("choices") or []:
                place = choice.get("delta") or choice.get("message") or choice
                piece = place.get("content") or place.get("text") or ""
                index = int(choice.get("index") or 0)
                texts[index] = texts.get(index, "") + piece
                pieces += bool(piece) and streamed
        except (ValueError, TypeError, AttributeError):
            continue
    return texts, usage, pieces
