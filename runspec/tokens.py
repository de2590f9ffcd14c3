"""Tokens that a recipe adds to a model's vocabulary: tokenizer.new_tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEY = "tokenizer.new_tokens"
# A vocabulary that grows has a multiple of this many rows, so that tensor parallelism can split it
# and matrix products are fast; the same in every layout.
MULTIPLE = 64


def new_tokens(tokenizer: Mapping[str, Any] | None) -> list[str]:
    """The tokens that a `tokenizer` block adds: its list, or the lines of the file that it names.

    Raises:
        ValueError: there is no such file, or what it says are no different tokens.
    """
    given = (tokenizer or {}).get("new_tokens") or []
    if isinstance(given, str):
        try:
            given = Path(given).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{KEY}: {given} cannot be read: {error}") from None
        given = [line for line in given if line.strip()]
    if not isinstance(given, list) or not all(isinstance(t, str) and t.strip() for t in given):
        raise ValueError(f"{KEY}: must be a list of texts, or a file with one per line")
    if twice := sorted({token for token in given if given.count(token) > 1}):
        raise ValueError(f"{KEY}: {', '.join(map(repr, twice))} is there twice")
    return given


def grown(vocabulary: int, tokens: int) -> int:
    """The rows of an embedding of `vocabulary` rows that is to have `tokens` of them."""
    return vocabulary if tokens <= vocabulary else -(-tokens // MULTIPLE) * MULTIPLE
