"""torchtune's stock single-device recipe: python -m tests.trainer.stock CONFIG METHOD ADAPTER

It runs in an environment of its own, as the entry torchtune: does.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from benchmarks.peers.torchtune import RECIPES, fill_adapter, stock_recipe
from trainer.data.tokenizers import HuggingFaceTokenizer


class Tokenizer(HuggingFaceTokenizer):
    """The folder's tokenizer as torchtune's datasets call one."""

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        """Replace a sample's `messages` by its `tokens` and `mask`."""
        messages = sample["messages"]
        turns = [{"role": each.role, "content": each.text_content} for each in messages]
        trained = [index for index, each in enumerate(messages) if not each.masked]
        tokens, mask = self.tokenize_turns(turns, trained)
        return {"tokens": tokens, "mask": mask}


def main(arguments: list[str]) -> None:
    """Train by a config of torchtune's with `full` or `lora`."""
    path, method, adapter = arguments
    config = OmegaConf.load(path)
    recipe = stock_recipe(*RECIPES[method, False])(cfg=config)
    recipe.setup(cfg=config)
    # torchtune draws the adapter from the global random state; both must start from the same one.
    if method == "lora":
        fill_adapter(recipe._model, Path(adapter))
    recipe.train()
    recipe.cleanup()


if __name__ == "__main__":
    main(sys.argv[1:])
