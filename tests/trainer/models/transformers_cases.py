"""Tiny random models of transformers' own classes, one for each family that is proven."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

SIZES = {
    "vocab_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    # Weights so large that a wrong mask, angle or cap shows in the logits.
    "initializer_range": 0.1,
    # A padding token has an embedding of zeros, and behind a norm a gradient without bound.
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 4,
}
# Shorter than the tests' documents.
WINDOW = {"sliding_window": 16}
MIXED = WINDOW | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 40,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "llama_4_scaling_beta": 0.1,
}
# As Phi 4 mini: three quarters of a head rotated, by other factors beyond the first length. One of
# the tests' documents is shorter and one is longer.
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [2.0 + i for i in range(6)],
    "original_max_position_embeddings": 40,
}
# By the family's name: transformers' model type, and what its configuration has beside SIZES.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama3-tied": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "qwen2.5": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}),
    "qwen3": ("qwen3", {"head_dim": 20}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 20,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.5,
            **WINDOW,
        },
    ),
    "gemma3": ("gemma3_text", {"head_dim": 20, "query_pre_attn_scalar": 24, **MIXED}),
    # As its dense models: another width of heads in the layers without a window, where keys are
    # the values, too.
    "gemma4": (
        "gemma4_text",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            # Scores are not divided by the width of a head.
            "initializer_range": 0.06,
            "final_logit_softcapping": 2.5,
            "tie_word_embeddings": True,
            **WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "mistral": ("mistral", WINDOW),
    "ministral3": ("ministral3", {"rope_parameters": YARN}),
    "phi4-mini": ("phi3", {"rope_parameters": LONG, "tie_word_embeddings": True}),
    "glm4": ("glm4", {"head_dim": 16}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", MIXED),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "granite": (
        "granite",
        {
            "logits_scaling": 3.0,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.3,
        },
    ),
    "exaone4": ("exaone4", MIXED),
    "cohere2": ("cohere2", {"logit_scale": 2.0, **MIXED}),
    "qwen3-moe": (
        "qwen3_moe",
        {"head_dim": 20, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            # So low that some gates are cut off.
            "swiglu_limit": 1.0,
            **MIXED,
        },
    ),
    "glm4.5-moe": (
        "glm4_moe",
        {
            "head_dim": 16,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 24,
            "q_lora_rank": 40,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
        },
    ),
    "granite-moe": (
        "granitemoe",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "logits_scaling": 3.0,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.3,
        },
    ),
}
_LINEAR = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 16,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "head_dim": 16,
    # Small enough that twenty steps do not spread the last bits.
    "initializer_range": 0.05,
}
_SHARED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
FAMILIES |= {
    "qwen3.5": ("qwen3_5_text", _LINEAR),
    "qwen3-next": ("qwen3_next", _LINEAR | _SHARED),
    "qwen3.5-moe": ("qwen3_5_moe_text", _LINEAR | _SHARED),
}
FAMILIES["llama4"] = (
    "llama4_text",
    {
        "head_dim": 16,
        "intermediate_size_mlp": 128,
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "num_hidden_layers": 4,
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
        "no_rope_layers": [1, 1, 1, 0],
        "attention_chunk_size": 128,
    },
)
_IMAGES = {"image_size": 28, "patch_size": 14, "hidden_size": 32, "intermediate_size": 32}
_IMAGES |= {"num_hidden_layers": 1, "num_attention_heads": 2}
_QWEN_IMAGES = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
_QWEN_IMAGES |= {"out_hidden_size": SIZES["hidden_size"]}
# Models of text and images, whose text part is trained: kind, text part, part for images.
LARGER: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3-12b": (
        "gemma3",
        "gemma3",
        {
            "vision_config": {"model_type": "siglip_vision_model", **_IMAGES},
            "mm_tokens_per_image": 4,
        },
    ),
    "ministral3-8b": (
        "mistral3",
        "ministral3",
        {"vision_config": {"model_type": "pixtral", "head_dim": 16, **_IMAGES}},
    ),
    # transformers has a class for its text part alone, with other names.
    "qwen3.5": ("qwen3_5", "qwen3.5", {"vision_config": _QWEN_IMAGES}),
    # Its class does not scale the logits, as its text model's does.
    "command-a-vision": (
        "cohere2_vision",
        "cohere2",
        {"vision_config": {"model_type": "siglip_vision_model", **_IMAGES}},
    ),
}


def write_larger(name: str, folder: Path) -> Path:
    """Write a random model of text and images."""
    kind, text, settings = LARGER[name]
    text_kind, text_settings = FAMILIES[text]
    torch.manual_seed(1)
    part = {"model_type": text_kind, **SIZES, **text_settings}
    config = AutoConfig.for_model(kind, text_config=part, **settings)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return folder


def write(family: str, folder: Path, tokenizer: Path | None = None, **sizes: Any) -> Path:
    """Write a random model, norms and biases included, with another folder's tokenizer."""
    kind, settings = FAMILIES[family]
    torch.manual_seed(1)
    given = {**SIZES, **settings, **sizes}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **given))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith(("bias", "sinks")):
                parameter.normal_(std=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(std=0.1)
    model.save_pretrained(folder)
    if tokenizer is not None:
        for path in [*tokenizer.glob("*token*"), *tokenizer.glob("chat_template*")]:
            shutil.copyfile(path, folder / path.name)
    return folder


def reference(folder: Path) -> torch.nn.Module:
    """The model as transformers loads it, with its own attention."""
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
