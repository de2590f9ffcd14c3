"""Keeps secrets out of messages and records. Standard library only."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

# Tokens of the Hugging Face hub, GitHub, GitLab, OpenAI and others, AWS and Slack; a JSON web
# token; the user and password of an address.
_TOKENS = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{20,}"
    r"|\bsk-[A-Za-z0-9_-]{20,}|\bAKIA[0-9A-Z]{16}\b|\bxox[abprs]-[\w-]{10,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)
# A shorter secret would blot out words that mean something else.
_SHORTEST = 6


def redacted(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return a text without the values of the run's secrets, and without what looks like a token.

    Args:
        environ: COOKBOOK_SECRETS has a line NAME=PATH for each secret; the value is NAME's, else
            the file's.
    """
    for line in environ.get("COOKBOOK_SECRETS", "").splitlines():
        name, _, path = line.partition("=")
        value = environ.get(name) or _content(path)
        if len(value) >= _SHORTEST:
            text = text.replace(value, f"<{name}>")
    return _TOKENS.sub("<redacted>", text)


def _content(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").rstrip("\n")
    except OSError:
        return ""
