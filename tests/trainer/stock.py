"""Run torchtune's stock single-device recipe: python -m tests.trainer.stock <config> <method>"""

import sys

from omegaconf import OmegaConf

from benchmarks.peers.torchtune import RECIPES, stock_recipe
from trainer import weights

if __name__ == "__main__":
    config = OmegaConf.load(sys.argv[1])
    recipe = stock_recipe(*RECIPES[sys.argv[2], False])(cfg=config)
    recipe.setup(cfg=config)
    # torchtune draws the adapter from the global random state; both must start from the same one.
    weights.initialise_adapter(recipe._model, config.seed)
    recipe.train()
    recipe.cleanup()
