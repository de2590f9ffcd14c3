"""The model families: how the Hugging Face hub stores the weights of each, and its config.json."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trainer.errors import ConfigError

# By torchtune's name of a module, the hub's: first those outside the blocks, then inside a block.
LLAMA = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.output_proj": "self_attn.o_proj",
    "mlp.w1": "mlp.gate_proj",
    "mlp.w3": "mlp.up_proj",
    "mlp.w2": "mlp.down_proj",
    "sa_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
# torchtune's own conversion puts the norm after the MLP before it, and the one before it after it.
GEMMA2 = LLAMA | {
    "sa_scale": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_scale": "post_feedforward_layernorm",
}
# Tensors that hold the rows of several layers.
PHI3 = (
    LLAMA
    | dict.fromkeys(("attn.q_proj", "attn.k_proj", "attn.v_proj"), "self_attn.qkv_proj")
    | dict.fromkeys(("mlp.w1", "mlp.w3"), "mlp.gate_up_proj")
)
# What transformers assumes for a key that config.json does not have.
DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "sliding_window": None,
}


@dataclass(frozen=True)
class Family:
    """What the models of one `model_type` in config.json have in common."""

    # torchtune's names for it in `checkpointer.model_type`.
    model_types: tuple[str, ...]
    # By torchtune's name of a module, the hub's.
    names: dict[str, str] = field(default_factory=lambda: LLAMA)
    # torchtune has interleaved RoPE (it rotates neighbouring features together), so that the rows
    # of q and k are in another order than on the hub, where RoPE rotates a feature of a head's
    # first half with one of its second half.
    interleaved: bool = True
    # (config.json's numbers, layer) -> whether the layer has the sliding window.
    slides: Callable[[dict[str, Any], int], bool] = lambda numbers, layer: False
    # Numbers that config.json may leave out.
    defaults: dict[str, Any] = field(default_factory=dict)


# By config.json's model_type.
FAMILIES = {
    "llama": Family(("LLAMA2", "LLAMA3", "LLAMA3_2")),
    "mistral": Family(
        ("MISTRAL",),
        slides=lambda numbers, layer: True,
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    ),
    "qwen2": Family(
        ("QWEN2",),
        interleaved=False,
        slides=lambda numbers, layer: layer >= numbers["max_window_layers"],
        defaults={"num_key_value_heads": 32, "max_window_layers": 28},
    ),
    "gemma2": Family(
        ("GEMMA2",),
        GEMMA2,
        slides=lambda numbers, layer: layer % 2 == 0,
        defaults={
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 4096,
            "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
    "phi3": Family(
        ("PHI3_MINI", "PHI4"),
        PHI3,
        interleaved=False,
        slides=lambda numbers, layer: True,
        defaults={"rms_norm_eps": 1e-5},
    ),
}


def of(hf_config: dict[str, Any]) -> Family:
    """The family of a model by its config.json; raises ConfigError if it is not known."""
    kind = hf_config.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(
            f"checkpointer.checkpoint_dir: config.json has model_type {kind!r}, which is not "
            f"supported; known: {', '.join(FAMILIES)}"
        )
    return FAMILIES[kind]


def numbers(hf_config: dict[str, Any]) -> dict[str, Any]:
    """config.json with transformers' defaults, its rotary settings on the top level.

    Raises:
        ConfigError: the family is not known, or a size is missing.
    """
    values = DEFAULTS | of(hf_config).defaults | hf_config
    missing = [
        f"checkpointer.checkpoint_dir: config.json has no {key}; download the model again"
        for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
        if not isinstance(values.get(key), int)
    ]
    if missing:
        raise ConfigError(*missing)
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    values["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    for key, default in {"rope_theta": 10_000, "partial_rotary_factor": 1.0}.items():
        values[key] = rope.get(key, hf_config.get(key, default))
    scaled = values["rope_type"] == "llama3"
    # Llama 3.1's scaling by a factor of 1 is none.
    values["factor"] = rope.get("factor") if scaled else 1
    for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        values[key] = rope.get(key) if scaled else None
    heads = values["num_attention_heads"]
    values["num_key_value_heads"] = values.get("num_key_value_heads") or heads
    values["head_dim"] = values.get("head_dim") or values["hidden_size"] // heads
    values["hidden_act"] = values.get("hidden_activation") or values["hidden_act"]
    if hf_config["model_type"] == "qwen2" and not hf_config.get("use_sliding_window"):
        values["sliding_window"] = None
    return values
