"""Sizes of models for tests: those of the demo recipe's model, and of one with experts."""

from pathlib import Path

import yaml

RECIPE = Path(__file__).parents[1] / "configs/recipes/demo.yaml"
# What torchtune's builders take as sizes, all of them whole numbers.
DEMO = {
    key: value
    for key, value in yaml.safe_load(RECIPE.read_text())["model"].items()
    if isinstance(value, int)
}
# Its config.json as on the hub, without what no size comes from.
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
