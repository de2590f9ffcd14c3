"""Which repositories a recipe's hub: block names, and where their files go."""

from __future__ import annotations

from pathlib import Path

from launcher.checks.model import checkpoint_files, tokenizer_files
from launcher.errors import RecipeFault
from launcher.hub.repository import Repository
from launcher.recipes.recipe import Recipe
from launcher.site import Site


def wanted(recipe: Recipe, cluster: Site, revision: str | None) -> list[Repository]:
    """Return what the recipe names; RecipeFault if there is nothing to fetch.

    revision: the model's, in place of the recipe's.
    """
    config = recipe.resolved(cluster.root, "run")
    block = config.get("hub") or {}
    if not block:
        raise RecipeFault(
            f"recipe {recipe.name} has no hub: block, so there is nothing to download: add "
            "hub: {model: ORGANISATION/NAME, dataset: ORGANISATION/NAME} to it, or give "
            "+hub.model=ORGANISATION/NAME"
        )
    found = []
    if block.get("model"):
        name, _, named = block["model"].partition("@")
        checkpointer = config.get("checkpointer") or {}
        if not checkpointer.get("checkpoint_dir"):
            raise RecipeFault(
                f"recipe {recipe.name} names no folder for its model: set "
                "checkpointer.checkpoint_dir="
            )
        folder = Path(str(checkpointer["checkpoint_dir"]))
        files = [path for path in tokenizer_files(config).values() if path != folder]
        inside = [str(path.relative_to(folder)) for path in files if path.is_relative_to(folder)]
        needs = (*checkpoint_files(checkpointer), *inside)
        found.append(Repository("model", name, revision or named or "main", folder, needs))
    if block.get("dataset"):
        name, _, named = block["dataset"].partition("@")
        # Where jobs look, since their HF_HOME is hf/ of the shared root.
        folder = cluster.root / "hf" / "hub" / f"datasets--{name.replace('/', '--')}"
        found.append(Repository("dataset", name, named or "main", folder))
    return found
