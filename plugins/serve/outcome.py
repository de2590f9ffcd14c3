"""The outcome of a request, collected while its answer is passed on: text, tokens, times."""

import time
from typing import Any


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

    def text_came(self) -> None:
        """Note the time of the first text."""
        if self.first is None:
            self.first = time.perf_counter() - self.began

    def row(self) -> dict[str, Any]:
        """Return the columns of the log."""
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
