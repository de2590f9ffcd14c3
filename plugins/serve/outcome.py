"""The outcome of a request, collected while its answer is passed on: text, tokens, times."""

import time
from contextlib import suppress
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
        # How many pieces of a stream had text: about its tokens, where nobody counts them.
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
        self._count()
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

    def _count(self) -> None:
        """Take the tokens from the parts that were passed on: one line of JSON, or events."""
        for line in b"".join(self._parts).splitlines():
            with suppress(ValueError, AttributeError):
                value = parse_json(line.removeprefix(b"data:"))
                self.usage = value.get("usage") or self.usage
                self.pieces += line.startswith(b"data:") and bool(value.get("choices"))
