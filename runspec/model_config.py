"""The shape of a model from its config.json, or from the arguments of torchtune's builders."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from runspec.layout import longest_row
from runspec.shape import MIXED, Experts, Heads, Kind, Latent, Linear, Shape

# Configurations of models of the hub as published, by the folder's name.
PUBLISHED = Path(__file__).parents[1] / "configs" / "shapes"


class ShapeError(ValueError):
    """The sizes of a model cannot be told; the text says why, without the file's name."""


# By Shape's names: the key of a config.json, the argument of torchtune's component builders.
_NAMES = {
    "dim": ("hidden_size", "embed_dim"),
    "layers": ("num_hidden_layers", "num_layers"),
    "heads": ("num_attention_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "intermediate": ("intermediate_size", "intermediate_dim"),
    "vocab": ("vocab_size", "vocab_size"),
    "max_seq_len": ("max_position_embeddings", "max_seq_len"),
}


def config_file(folder: Path) -> Path | None:
    """Return the config.json of a model folder; the published one if it is not downloaded yet."""
    files = (folder / "config.json", PUBLISHED / f"{folder.name}.json")
    return next((file for file in files[: 1 + (not folder.is_dir())] if file.is_file()), None)


# What transformers' configuration classes assume for a key that a config.json leaves out, where the
# families' folders on the hub do leave it out.
_ASSUMED: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 256},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
    },
    "gemma4_text": {"head_dim": 256, "vocab_size": 262_144, "hidden_size_per_layer_input": 256},
    "mistral": {"num_key_value_heads": 8},
    "ministral3": {"head_dim": 128},
    "qwen3": {"head_dim": 128},
    "glm4": {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
    "smollm3": {"num_key_value_heads": 4},
}
# Those of linear attention; in their other layers attention's output has a gate.
_LINEAR = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
# Families of transformers' that our tensor parallelism cannot split: their norms are no RMSNorms.
_WHOLE = ("cohere2",)
# Gate and up projection come out of one product.
_FUSED_MLP = ("phi3", "glm", "glm4")
# Their norms stand behind attention and the MLP, and none before them.
_POST_NORMS = ("exaone4", "olmo2", "olmo3")
# Those whose queries and keys have a norm as wide as a head.
_HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3_text", "gemma4_text", "exaone4", *_LINEAR)
# Their `attention_bias` is that of queries, keys and values only.
_WITHOUT_OUTPUT_BIAS = ("glm4", "glm4_moe")
# Those whose norms multiply their scale in fp32, Gemma's beside them.
_WIDE_NORMS = ("gpt_oss", "olmo2", "olmo3", "cohere2", *_LINEAR)
# Those whose experts transformers stores as runspec.shape has them.
_WITH_EXPERTS = (
    *("mixtral", "qwen3_moe", "gpt_oss", "granitemoe", "llama4_text", "glm4_moe", "deepseek_v3"),
    *("qwen3_next", "qwen3_5_moe_text"),
)
# Their routers compute in fp32, and a bias of theirs balances them.
_WIDE_ROUTERS = ("glm4_moe", "deepseek_v3")
# In each block one before and one behind attention and the MLP.
_FOUR_NORMS = ("gemma2", "gemma3", "gemma3_text", "gemma4_text", "glm4")
# Their MLP has two matrices, which no shape can say.
_WITHOUT_GATE = ("apertus", "arcee", "nemotron", "starcoder2")


def family_traits(family: str) -> dict[str, Any]:
    """What a family's models have that no size shows, by Shape's names.

    family: a model_type of Hugging Face's, or a module of torchtune's.
    """
    tied = ("gemma", "llama3_2", "smollm3", "cohere2")
    norms = {"cohere2": 1} | dict.fromkeys(_FOUR_NORMS, 4)
    return {
        "tied": family.startswith(tied),
        "qkv_bias": family.startswith("qwen2"),
        "norms": norms.get(family, 2),
        "softcap": family == "gemma2",
        # The families whose tables torchtune makes as wide as Hugging Face does.
        "whole_rotary": family.startswith(("qwen2", "phi3", "phi4")),
    }


def of_config_json(content: Mapping[str, Any]) -> Shape:
    """Return the shape that a Hugging Face config.json says; of its text model, if it has others.

    Raises:
        ShapeError: its experts are of an unknown kind, or a size is missing.
    """
    text = content.get("text_config")
    given = dict(text) if isinstance(text, Mapping) else dict(content)
    family = str(given.get("model_type") or content.get("model_type") or "")
    # Whether a part's output is tied is the whole model's to say.
    given |= {key: content[key] for key in ("tie_word_embeddings",) if key in content}
    given = _ASSUMED.get(family, {}) | {k: v for k, v in given.items() if v is not None}
    if given.get("hidden_size_per_layer_input") or given.get("num_kv_shared_layers"):
        raise ShapeError(
            "it has embeddings for each layer, or layers that share keys and values, which are not "
            "known to the estimate yet"
        )
    if family in _WITHOUT_GATE:
        raise ShapeError(f"the MLP of a {family} model is not known to the estimate yet")
    experts = _experts(given, family)
    sizes = {name: given.get(key) for name, (key, _) in _NAMES.items()}
    sizes["kv_heads"] = sizes["kv_heads"] or sizes["heads"]
    # Where all blocks have experts, no MLP beside them has a width.
    sizes["intermediate"] = sizes["intermediate"] or (experts and experts.shared)
    if family == "llama4_text":
        sizes["intermediate"] = given.get("intermediate_size_mlp")
        # As transformers' class assumes them if config.json does not say.
        scaled = given.get("attn_temperature_tuning", True)
        sizes["max_seq_len"] = longest_row(
            int(sizes["max_seq_len"] or 131_072),
            int(given.get("attention_chunk_size") or 8192),
            int(given.get("floor_scale") or 8192) if scaled else None,
        )
    if missing := [_NAMES[name][0] for name, size in sizes.items() if not size]:
        raise ShapeError(f"it does not say {', '.join(missing)}: give the folder of a text decoder")
    latent = _latent(given) if "kv_lora_rank" in given else None
    if latent:
        given["head_dim"] = latent.plain + latent.rotary
    shape = _shape(sizes, given, family)
    biased = bool(given.get("attention_bias", shape.qkv_bias))
    return replace(
        shape,
        qkv_bias=biased and latent is None,
        output_bias=biased and family not in (*_WITHOUT_OUTPUT_BIAS, "qwen2"),
        head_norms=_head_norms(shape, given, family),
        whole=family in _WHOLE,
        fused=family == "phi3",
        fused_mlp=family in _FUSED_MLP,
        post_norms=family in _POST_NORMS,
        softcap=bool(given.get("final_logit_softcapping", shape.softcap)),
        experts=experts,
        latent=latent,
        gated=family in _LINEAR,
        linear=_linear(given, family),
        sinks=family == "gpt_oss",
        window=_window(given),
        wide_norms=family.startswith("gemma") or family in _WIDE_NORMS,
        far=_far(shape, given) if family == "gemma4_text" else None,
        kinds=_kinds(shape.layers, given, experts),
    )


def _head_norms(shape: Shape, given: Mapping[str, Any], family: str) -> int:
    """Numbers in the norms of queries and keys in one block."""
    each_head = family in _HEAD_NORMS or (family == "glm4_moe" and given.get("use_qk_norm"))
    if family in ("olmo2", "olmo3"):
        return shape.query_width + shape.kv_width
    return 2 * shape.head_dim if each_head else 0


def _far(shape: Shape, given: Mapping[str, Any]) -> Heads:
    """Gemma 4's heads in layers without a window."""
    shares, kv_heads = bool(given.get("attention_k_eq_v")), None
    # As transformers writes it, by layer; as the hub has it, for all of them.
    by_layer = next(iter((given.get("per_layer_config") or {}).values()), None)
    if by_layer is None:
        width = int(given.get("global_head_dim") or 512)
        kv_heads = given.get("num_global_key_value_heads") if shares else None
    else:
        width, kv_heads = int(by_layer["head_dim"]), by_layer.get("num_key_value_heads")
    return Heads(width, int(kv_heads or shape.kv_heads), 2 * width, shares)


# Experts and other kinds of attention -------------------------------------------------------------

# Keys with the word in them that do not count routed experts.
_NO_COUNT = re.compile("per_tok|shared|top_k")
# What counts experts in a config.json.
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def _experts(given: Mapping[str, Any], family: str) -> Experts | None:
    counted = list(_expert_counts(given))
    if all(count <= 1 for _, count in counted):
        return None
    if family not in _WITH_EXPERTS:
        found = ", ".join(f"{key} {count}" for key, count in counted if count > 1)
        raise ShapeError(
            f"it has a mixture of experts ({found}), and those of a {family} model are not known "
            "to the estimate yet"
        )
    count = next(given[key] for key in _COUNTS if given.get(key))
    width = given.get("moe_intermediate_size") or given.get("intermediate_size")
    active = given.get("num_experts_per_tok")
    if not (width and active):
        raise ShapeError("it does not say num_experts_per_tok, or how wide its experts are")
    shared = given.get("shared_expert_intermediate_size") or 0
    if family == "llama4_text":
        shared = width
    return Experts(
        int(count),
        int(active),
        int(width),
        shared=int(shared or width * (given.get("n_shared_experts") or 0)),
        shared_gate=family in _LINEAR,
        bias=family == "gpt_oss",
        wide_router=family in _WIDE_ROUTERS,
        watched=family not in (*_WIDE_ROUTERS, "llama4_text"),
    )


def _expert_counts(content: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Every key that counts experts: num_experts, num_local_experts, n_routed_experts, ..."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _expert_counts(value)
        elif isinstance(value, int) and "experts" in key and not _NO_COUNT.search(key):
            yield key, value


def _latent(given: Mapping[str, Any]) -> Latent:
    keys = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    return Latent(int(given.get("q_lora_rank") or 0), *(int(given[key]) for key in keys))


def _linear(given: Mapping[str, Any], family: str) -> Linear | None:
    if family not in _LINEAR:
        return None
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    key_heads, value_heads, key, value = (int(given[f"linear_{name}"]) for name in names)
    kernel = int(given.get("linear_conv_kernel_dim") or 4)
    linear = Linear(key_heads, value_heads, key, value, kernel, ())
    mixed, width, heads = linear.mixed, linear.value_width, linear.value_heads
    parts = {MIXED: mixed, "in_proj_z": width, "in_proj_b": heads, "in_proj_a": heads}
    if family == "qwen3_next":
        parts = {"in_proj_qkvz": mixed + width, "in_proj_ba": 2 * heads}
    return replace(linear, parts=tuple(parts.items()))


def _window(given: Mapping[str, Any]) -> int | None:
    slides = given.get("use_sliding_window", True)
    return int(given["sliding_window"]) if slides and given.get("sliding_window") else None


def _kinds(layers: int, given: Mapping[str, Any], experts: Experts | None) -> tuple[Kind, ...]:
    """What each block has; nothing if they are all alike and have no window."""
    types = given.get("layer_types") or _layer_types(layers, given)
    found = tuple(
        Kind(
            types[index] == "linear_attention",
            experts is not None and _has_experts(index, given),
            types[index] == "sliding_attention",
        )
        for index in range(layers)
    )
    alike = set(found) == {Kind(False, experts is not None, _window(given) is not None)}
    return () if alike else found


def _layer_types(layers: int, given: Mapping[str, Any]) -> list[str]:
    """As transformers' configuration classes fill them in."""
    family = given.get("model_type")
    every = {"gemma3_text": 6, "gemma4_text": 6, "gemma2": 2, "gpt_oss": 2}.get(str(family), 0)
    every, other = int(given.get("sliding_window_pattern") or every), "sliding_attention"
    if family in _LINEAR:
        every, other = int(given.get("full_attention_interval") or 4), "linear_attention"
    if family == "qwen2" and _window(given):
        first = int(given.get("max_window_layers") or layers)
        return ["full_attention" if i < first else other for i in range(layers)]
    if not every:
        return [other if _window(given) else "full_attention"] * layers
    return [other if (index + 1) % every else "full_attention" for index in range(layers)]


def _has_experts(index: int, given: Mapping[str, Any]) -> bool:
    if "moe_layers" in given:
        return index in given["moe_layers"]
    if index < int(given.get("first_k_dense_replace") or 0):
        return False
    if index in (given.get("mlp_only_layers") or ()):
        return False
    step = given.get("decoder_sparse_step") or given.get("interleave_moe_layer_step") or 1
    return (index + 1) % int(step) == 0


def of_builder_arguments(arguments: Mapping[str, Any], family: str) -> Shape | None:
    """Return the shape that a torchtune component builder makes of its arguments.

    None if they do not say all sizes. family: llama3, qwen2, gemma2 ..., the builder's module.
    """
    sizes = {name: arguments.get(argument) for name, (_, argument) in _NAMES.items()}
    if sizes["intermediate"] is None and sizes["dim"]:
        # torchtune's rule for its default: 8/3 of the width, in steps of 256.
        sizes["intermediate"] = -(-(8 * sizes["dim"] // 3) // 256) * 256
    return _shape(sizes, arguments, family) if all(sizes.values()) else None


def _shape(sizes: Mapping[str, Any], given: Mapping[str, Any], family: str) -> Shape:
    known: dict[str, Any] = {name: int(size) for name, size in sizes.items()}
    head_dim = int(given.get("head_dim") or known["dim"] // known["heads"])
    traits = family_traits(family)
    traits["tied"] = bool(given.get("tie_word_embeddings", traits["tied"]))
    return Shape(**known, head_dim=head_dim, **traits)
