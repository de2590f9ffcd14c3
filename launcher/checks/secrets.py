"""Whether the recipe's secrets are out of its files, and readable by nobody else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from launcher.checks import Context, unreadable
from launcher.checks.finding import Finding, failed, ok
from launcher.recipes.recipe import Recipe

_HUB_TOKEN = re.compile(r"hf_[A-Za-z0-9]{20,}")


def secrets(context: Context) -> Iterable[Finding]:
    found = [*_tokens(context.config, ""), *_secret_files(context.recipe)]
    named = ", ".join(context.recipe.secrets)
    words = f"no token in the recipe{f'; {named} read from files' if named else ''}"
    return found or [ok("secrets", words)]


def _tokens(value: Any, where: str) -> Iterator[Finding]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _tokens(inner, f"{where}.{key}".lstrip("."))
    elif isinstance(value, list):
        for inner in value:
            yield from _tokens(inner, where)
    elif isinstance(value, str) and _HUB_TOKEN.search(value):
        words = f"{where} holds a Hugging Face token, and a run's files are readable"
        yield failed("secrets", words, "remove it; use HF_TOKEN_PATH")


def _secret_files(recipe: Recipe) -> Iterator[Finding]:
    """Check that a secret's file exists and is private; its value is never read."""
    for name, path in recipe.secrets.items():
        why = unreadable(path)
        if why:
            remedy = (
                f"write the value there with: (umask 077; mkdir -p {path.parent}; cat > {path})"
            )
            yield failed("secrets", f"secrets.{name}: {path} {why}", remedy)
        elif path.stat().st_mode & 0o077:
            words = f"secrets.{name}: others may read {path}"
            yield failed("secrets", words, f"chmod 600 {path}")
