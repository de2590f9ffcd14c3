"""What the recipe itself says: its layout, its secrets, and the script that it starts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from launcher import venv
from launcher.checks import Context, Finding, failed, ok, unreadable
from launcher.recipes import stock
from launcher.runs import snapshot
from runspec.layout import Layout, LayoutError

_HUB_TOKEN = re.compile(r"hf_[A-Za-z0-9]{20,}")


def layout(context: Context) -> Iterable[Finding]:
    """Check if the recipe's parallel dimensions fit its number of GPUs."""
    config, resources = context.config, context.resources
    shape = f"{resources.nodes} x {resources.gpus_per_node} = {resources.world_size} ranks"
    if context.recipe.entry.checked != "complete":
        return [ok("layout", shape)]
    try:
        found = Layout.of(config, resources.world_size, resources.gpus_per_node)
    except LayoutError as error:
        return [failed("layout", fault) for fault in error.faults]
    batch, accumulation = config.get("batch_size", 1), config.get("gradient_accumulation_steps", 1)
    if found.tensor_parallel > 1:
        shape += f", tensor parallel {found.tensor_parallel}"
    groups = found.data_parallel
    shape += f"; {batch * accumulation * groups} samples per step (batch {batch} x {accumulation}"
    return [ok("layout", f"{shape} micro-steps x {groups} data-parallel groups)")]


def secrets(context: Context) -> Iterable[Finding]:
    """Check if the recipe's secrets are out of its files, and readable by nobody else."""
    files = context.recipe.secrets
    found = [*_tokens(context.config, ""), *_secret_files(files)]
    read = f"; {', '.join(files)} read from files" if files else ""
    return found or [ok("secrets", f"no token in the recipe{read}")]


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


def _secret_files(files: dict[str, Path]) -> Iterator[Finding]:
    """Check that a secret's file exists and is private; its value is never read."""
    for name, path in files.items():
        if why := unreadable(path):
            write = f"(umask 077; mkdir -p {path.parent}; cat > {path})"
            words = f"secrets.{name}: {path} {why}"
            yield failed("secrets", words, f"write the value there with: {write}")
        elif path.stat().st_mode & 0o077:
            words = f"secrets.{name}: others may read {path}"
            yield failed("secrets", words, f"chmod 600 {path}")


def script(context: Context) -> Iterable[Finding]:
    """Check if the script is there, is copied, and finds what it imports."""
    recipe = context.recipe
    script, folder = recipe.entry.program(recipe), recipe.code_root
    if script is None:
        return [ok("script", "the kit's trainer")]
    if folder is None:
        return _imports(script, None)
    if not folder.is_dir():
        words, remedy = f"code_root {folder} is no folder", "give the one that holds your code"
    elif not script.is_file():
        words, remedy = f"entry: there is no script {script}", "its path counts from the recipe"
    elif not script.is_relative_to(folder):
        words = f"entry: {script} does not lie in code_root {folder}"
        remedy = "only that folder is copied: move the script, or change code_root"
    elif script.relative_to(folder) not in snapshot.files(folder):
        words = f"entry: git ignores {script}, so it would not be copied"
        remedy = f"git add -f {script.relative_to(folder)}"
    else:
        why = snapshot.fault(folder)
        return [failed("script", why)] if why else _imports(script, folder)
    return [failed("script", words, remedy)]


def _imports(script: Path, code_root: Path | None) -> list[Finding]:
    lacks, install = "which the virtual environment lacks", f"{venv.python()} -m pip install"
    missing = [
        failed("script", f"{script.name} imports {name}, {lacks}", f"{install} {name}")
        for name in stock.missing_imports(script, code_root)
    ]
    return missing or [ok("script", str(script))]
