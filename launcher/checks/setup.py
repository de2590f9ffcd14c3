"""Whether a recipe fits together: its layout, its secrets and the script that it starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from launcher import paths, snapshot, stock
from launcher.checks import Context, unreadable
from launcher.recipe import Recipe

_HUB_TOKEN = re.compile(r"hf_[A-Za-z0-9]{20,}")


def layout(context: Context) -> list[str] | str:
    config, resources = context.config, context.resources
    nodes, gpus, ranks = resources.nodes, resources.gpus_per_node, resources.world_size
    shape = f"{nodes} x {gpus} = {ranks} ranks"
    if context.recipe.entry != "sft":
        return shape
    tensor_parallel = config.get("tensor_parallel_dim") or 1
    if ranks % tensor_parallel:
        return [
            f"tensor_parallel_dim {tensor_parallel} does not divide {shape}: change it, or "
            "--nodes, or --gpus-per-node"
        ]
    if gpus % tensor_parallel:
        return [
            f"tensor_parallel_dim {tensor_parallel} does not divide the {gpus} GPUs of a node, so "
            "layers would be split over the network: change it, or --gpus-per-node"
        ]
    data_parallel = ranks // tensor_parallel
    replicate = config.get("data_parallel_replicate_dim") or 1
    shard = config.get("data_parallel_shard_dim")
    shard = data_parallel // replicate if shard in (None, -1) else shard
    if replicate * shard != data_parallel:
        return [
            f"data_parallel_replicate_dim {replicate} x data_parallel_shard_dim {shard} is not "
            f"the {data_parallel} ranks that {shape} leave beside tensor_parallel_dim "
            f"{tensor_parallel}: set data_parallel_shard_dim=-1, or change one"
        ]
    batch, accumulation = config.get("batch_size", 1), config.get("gradient_accumulation_steps", 1)
    split = f", tensor parallel {tensor_parallel}" if tensor_parallel > 1 else ""
    return (
        f"{shape}{split}; {batch * accumulation * data_parallel} samples a step (batch {batch} x "
        f"{accumulation} micro-steps x {data_parallel})"
    )


def secrets(context: Context) -> list[str] | str:
    found = _tokens(context.config, "") + _secret_files(context.recipe)
    named = ", ".join(context.recipe.secrets)
    return found or (f"no token in the recipe{f'; {named} read from files' if named else ''}")


def _tokens(value: Any, where: str) -> list[str]:
    if isinstance(value, dict):
        return [
            fault
            for key, inner in value.items()
            for fault in _tokens(inner, f"{where}.{key}".lstrip("."))
        ]
    if isinstance(value, list):
        return [fault for inner in value for fault in _tokens(inner, where)]
    if isinstance(value, str) and _HUB_TOKEN.search(value):
        return [
            f"{where} holds a Hugging Face token, and a run's files are readable: remove it; use "
            "HF_TOKEN_PATH"
        ]
    return []


def _secret_files(recipe: Recipe) -> list[str]:
    """A secret must be there and nobody else's to read; its value is never looked at."""
    found = []
    for name, path in recipe.secrets.items():
        why = unreadable(path)
        if why:
            found.append(
                f"secrets.{name}: {path} {why}: write the value there with: "
                f"(umask 077; mkdir -p {path.parent}; cat > {path})"
            )
        elif path.stat().st_mode & 0o077:
            found.append(f"secrets.{name}: others may read {path}: chmod 600 {path}")
    return found


def script(context: Context) -> list[str] | str:
    recipe = context.recipe
    if recipe.entry == "sft":
        return "the kit's trainer"
    script, folder = recipe.script, recipe.code_root
    if script is None or folder is None:
        known = stock.recipes().get(recipe.entry.removeprefix("torchtune:"))
        return _imports(known.path, None) if known else []
    if not folder.is_dir():
        return [f"code_root {folder} is no folder: give the one that holds your code"]
    if not script.is_file():
        return [f"entry: there is no script {script}: its path counts from the recipe's file"]
    if not script.is_relative_to(folder):
        return [f"entry: {script} does not lie in code_root {folder}: only that folder is copied"]
    relative = script.relative_to(folder)
    files = snapshot.files(folder)
    if relative not in files:
        return [f"entry: git ignores {script}, so it would not be copied: git add -f {relative}"]
    why = snapshot.fault(folder)
    return [why] if why else _imports(script, folder)


def _imports(script: Path, code_root: Path | None) -> list[str] | str:
    missing = [
        f"{script.name} imports {name}, which the environment lacks: "
        f"{paths.venv_root() / 'bin' / 'python'} -m pip install {name}"
        for name in stock.missing_imports(script, code_root)
    ]
    return missing or str(script)
