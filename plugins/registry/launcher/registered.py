"""A recipe that trains on from a registered model: models:/NAME@ALIAS as its checkpoint_dir."""

from dataclasses import replace

from launcher.errors import UsageFault
from launcher.recipe.model import Recipe
from launcher.site import Site


def in_recipe(recipe: Recipe, site: Site) -> Recipe:
    """Return a recipe whose checkpoint_dir is a folder where it named models:/NAME@ALIAS."""
    block = recipe.config.get("checkpointer")
    given = block.get("checkpoint_dir") if isinstance(block, dict) else None
    if not (isinstance(block, dict) and isinstance(given, str) and given.startswith("models:/")):
        return recipe
    # Imported late: few recipes name one, and every estimate asks here.
    from plugins.registry.launcher.models import resolve

    model = resolve(site, given)
    if model.is_adapter:
        raise UsageFault(
            f"checkpointer.checkpoint_dir: {given} is an adapter ({model.folder}), but a run "
            "starts from full weights: give a version whose run exported merged weights"
        )
    config = {**recipe.config, "checkpointer": {**block, "checkpoint_dir": str(model.folder)}}
    return replace(recipe, config=config)
