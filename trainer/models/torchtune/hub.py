"""The model families: how the Hugging Face hub stores the weights of each, and its config.json."""

from dataclasses import dataclass, field
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

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
    # All layers have config.json's sliding window, if it does not say which.
    slides: bool = False


# By config.json's model_type.
FAMILIES = {
    "llama": Family(("LLAMA2", "LLAMA3", "LLAMA3_2")),
    "mistral": Family(("MISTRAL",), slides=True),
    "qwen2": Family(("QWEN2",), interleaved=False),
    "gemma2": Family(("GEMMA2",), GEMMA2),
    "phi3": Family(("PHI3_MINI", "PHI4"), PHI3, interleaved=False, slides=True),
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
        ConfigError: the family is not known, or transformers refuses the numbers.
    """
    family = of(hf_config)
    try:
        values = AutoConfig.for_model(**hf_config).to_dict()
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        reason = (str(error).splitlines() or [repr(error)])[0]
        raise ConfigError(
            f"checkpointer.checkpoint_dir: config.json is refused by transformers: {reason}"
        ) from None
    rope, layers = values["rope_parameters"], values["num_hidden_layers"]
    scaled = rope["rope_type"] == "llama3"
    scaling = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    kind = "sliding_attention" if family.slides else "full_attention"
    return values | {
        "rope_type": rope["rope_type"],
        "rope_theta": rope["rope_theta"],
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
        # Llama 3.1's scaling by a factor of 1 is none.
        "factor": rope["factor"] if scaled else 1,
        **{key: rope.get(key) if scaled else None for key in scaling},
        "head_dim": values.get("head_dim")
        or values["hidden_size"] // values["num_attention_heads"],
        "hidden_act": values.get("hidden_activation") or values["hidden_act"],
        "layer_types": values.get("layer_types") or [kind] * layers,
    }
