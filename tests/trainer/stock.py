"""Run torchtune's stock single-device recipe: python -m tests.trainer.stock <config> <method>"""

import importlib.util
import sys
from pathlib import Path

from omegaconf import OmegaConf

from trainer import weights

RECIPES = {
    "full": ("full_finetune_single_device.py", "FullFinetuneRecipeSingleDevice"),
    "lora": ("lora_finetune_single_device.py", "LoRAFinetuneRecipeSingleDevice"),
}


def stock_recipe(file: str, name: str) -> type:
    """A recipe class from its file; torchtune's recipes folder refuses to be imported."""
    path = Path(importlib.util.find_spec("recipes").origin).parent / file
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


if __name__ == "__main__":
    config = OmegaConf.load(sys.argv[1])
    recipe = stock_recipe(*RECIPES[sys.argv[2]])(cfg=config)
    recipe.setup(cfg=config)
    # torchtune draws the adapter from the global random state; both must start from the same one.
    weights.initialise_adapter(recipe._model, config.seed)
    recipe.train()
    recipe.cleanup()
