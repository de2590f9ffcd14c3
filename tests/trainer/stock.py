"""torchtune's stock single-device recipe: forks.run("tests.trainer.stock", config, method)."""

from omegaconf import OmegaConf

from benchmarks.peers.torchtune import RECIPES, stock_recipe
from trainer.checkpoint import weights
from trainer.layers.adapters.lora import LoRA


def main(arguments: list[str]) -> None:
    """Train by a config of torchtune's with `full` or `lora`."""
    path, method = arguments
    config = OmegaConf.load(path)
    recipe = stock_recipe(*RECIPES[method, False])(cfg=config)
    recipe.setup(cfg=config)
    # torchtune draws the adapter from the global random state; both must start from the same one.
    weights.initialise_adapter(recipe._model, config.seed, LoRA({}))
    recipe.train()
    recipe.cleanup()
