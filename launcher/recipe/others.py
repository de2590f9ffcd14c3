"""A file of another tool's that is given as a recipe: whose it is, and the recipe that it means."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.errors import RecipeFault
from launcher.recipe import air, entries

# One of these is in every recipe of the kit's trainer, and in none of another tool's files.
_OF_RECIPES = ("batch_size", "checkpointer", "dataset", "optimizer", "resources", "tokenizer")


def as_recipe(config: dict[str, Any], path: Path, prefix: str) -> dict[str, Any]:
    """Return the recipe that a file without `entry` means: its own content, or one around it.

    Args:
        prefix: the engine that was typed before the file's name, as in trl:FILE; "" for none.

    Raises:
        RecipeFault: it is a recipe with an entry of its own, or nobody's whom the kit knows.
    """
    if prefix and "entry" in config:
        raise RecipeFault(f"{path} has its own entry: name the file without {prefix}")
    if not prefix and air.is_workload(config):
        return air.recipe(config, path)
    if row := prefix or entries.recognised(config):
        # Unchanged: the kit's launch around it. Beside `config`, `entry` may name a program.
        return {"entry": f"{row}{path.name}", "config": path.name}
    if not any(key in config for key in _OF_RECIPES):
        raise RecipeFault(_unknown(config, path))
    return config


def _unknown(config: Mapping[str, Any], path: Path) -> str:
    if {"compute_environment", "distributed_type"} & config.keys():
        return (
            f"{path} has settings of accelerate launch: here the nodes and GPUs are --nodes and "
            "--gpus-per-node, and FSDP is the default; submit a recipe, or a config of your trainer"
        )
    known = {name: row.title for name, row in entries.rows().items() if row.recognises}
    titles = ", ".join([*known.values(), "torchtune"])
    named = [f", or name its trainer: cookbook submit {name}{path.name}" for name in known][:1]
    return (
        f"{path} is no recipe, and not known as a config of {titles}: write entry: and extends: "
        f"(docs/models.md){''.join(named)}"
    )
