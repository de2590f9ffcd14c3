"""The model families: how Hugging Face stores each, and what makes torchtune's builders equal it.

A model folder's config.json is the truth about a model. A number that no tensor's shape shows (a
rotary base, an epsilon, a soft cap, a window) must agree with it where the builder takes it as an
argument, and is taken from it where the builder takes none.
"""

import math
import re
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.compat import (
    FeedForward,
    Gemma2Attention,
    Gemma2FinalNorm,
    GemmaRMSNorm,
    Llama3ScaledRoPE,
    Phi3RotaryPositionalEmbeddings,
    Qwen2RotaryPositionalEmbeddings,
    RMSNorm,
    RotaryPositionalEmbeddings,
    TiedLinear,
    TransformerDecoder,
)
from trainer.errors import ConfigError
from trainer.files import read_json

# One Hugging Face tensor: the parameters whose rows lie in it one after another.
LLAMA_TENSORS = {
    "model.embed_tokens.weight": ("tok_embeddings.weight",),
    "model.layers.{}.self_attn.q_proj.weight": ("layers.{}.attn.q_proj.weight",),
    "model.layers.{}.self_attn.k_proj.weight": ("layers.{}.attn.k_proj.weight",),
    "model.layers.{}.self_attn.v_proj.weight": ("layers.{}.attn.v_proj.weight",),
    "model.layers.{}.self_attn.o_proj.weight": ("layers.{}.attn.output_proj.weight",),
    "model.layers.{}.mlp.gate_proj.weight": ("layers.{}.mlp.w1.weight",),
    "model.layers.{}.mlp.up_proj.weight": ("layers.{}.mlp.w3.weight",),
    "model.layers.{}.mlp.down_proj.weight": ("layers.{}.mlp.w2.weight",),
    "model.layers.{}.input_layernorm.weight": ("layers.{}.sa_norm.scale",),
    "model.layers.{}.post_attention_layernorm.weight": ("layers.{}.mlp_norm.scale",),
    "model.norm.weight": ("norm.scale",),
    "lm_head.weight": ("output.weight",),
}
QWEN2_TENSORS = LLAMA_TENSORS | {
    "model.layers.{}.self_attn.q_proj.bias": ("layers.{}.attn.q_proj.bias",),
    "model.layers.{}.self_attn.k_proj.bias": ("layers.{}.attn.k_proj.bias",),
    "model.layers.{}.self_attn.v_proj.bias": ("layers.{}.attn.v_proj.bias",),
}
# torchtune's own conversion puts the norm after the MLP before it, and the one before it after it.
GEMMA2_TENSORS = LLAMA_TENSORS | {
    "model.layers.{}.post_attention_layernorm.weight": ("layers.{}.sa_scale.scale",),
    "model.layers.{}.pre_feedforward_layernorm.weight": ("layers.{}.mlp_norm.scale",),
    "model.layers.{}.post_feedforward_layernorm.weight": ("layers.{}.mlp_scale.scale",),
}
PHI3_TENSORS = {
    "model.embed_tokens.weight": ("tok_embeddings.weight",),
    "model.layers.{}.self_attn.qkv_proj.weight": (
        "layers.{}.attn.q_proj.weight",
        "layers.{}.attn.k_proj.weight",
        "layers.{}.attn.v_proj.weight",
    ),
    "model.layers.{}.self_attn.o_proj.weight": ("layers.{}.attn.output_proj.weight",),
    "model.layers.{}.mlp.gate_up_proj.weight": (
        "layers.{}.mlp.w1.weight",
        "layers.{}.mlp.w3.weight",
    ),
    "model.layers.{}.mlp.down_proj.weight": ("layers.{}.mlp.w2.weight",),
    "model.layers.{}.input_layernorm.weight": ("layers.{}.sa_norm.scale",),
    "model.layers.{}.post_attention_layernorm.weight": ("layers.{}.mlp_norm.scale",),
    "model.norm.weight": ("norm.scale",),
    "lm_head.weight": ("output.weight",),
}
# What transformers assumes where config.json is silent.
DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "sliding_window": None,
}
# Rotary embeddings that turn neighbouring features together; the others, as Hugging Face does,
# turn a feature of a head's first half with one of its second half.
NEIGHBOURS = (RotaryPositionalEmbeddings, Llama3ScaledRoPE)
ROPES = (*NEIGHBOURS, Phi3RotaryPositionalEmbeddings, Qwen2RotaryPositionalEmbeddings)


@dataclass(frozen=True)
class Family:
    """What the models of one `model_type` in config.json have in common.

    Attributes:
        model_types: torchtune's names for it in `checkpointer.model_type`.
        tensors: Hugging Face's name of each tensor, and the parameters in its rows.
        reordered: torchtune turns neighbouring features of a head together, so that the rows of q
            and k are stored in another order than in Hugging Face's layout.
        slides: (config.json's numbers, layer) -> whether the layer has the sliding window.
    """

    model_types: tuple[str, ...]
    tensors: dict[str, tuple[str, ...]] = field(default_factory=lambda: LLAMA_TENSORS)
    reordered: bool = True
    slides: Callable[[dict[str, Any], int], bool] = lambda numbers, layer: False
    defaults: dict[str, Any] = field(default_factory=dict)

    def parts(self, key: str) -> tuple[str, ...]:
        """The parameters in the Hugging Face tensor `key`; () for one that no model has."""
        layer, template = _template(key)
        return tuple(name.format(layer) for name in self.tensors.get(template, ()))

    def hf_name(self, name: str) -> str | None:
        """The Hugging Face tensor that holds a base parameter; None where none does."""
        layer, template = _template(name)
        keys = (key.format(layer) for key, names in self.tensors.items() if template in names)
        return next(keys, None)

    def to_tune(self, name: str, rows: torch.Tensor, hf_config: dict[str, Any]) -> torch.Tensor:
        """The rows of parameter `name`, [out, ...], from Hugging Face's order to torchtune's."""
        heads = self._heads(name, hf_config)
        if heads is None:
            return rows
        halves = rows.unflatten(0, (heads, 2, -1))
        return halves.transpose(1, 2).reshape(rows.shape)

    def to_hf(self, name: str, rows: torch.Tensor, hf_config: dict[str, Any]) -> torch.Tensor:
        """The inverse of `to_tune`; for LoRA's B, [out, rank], too."""
        heads = self._heads(name, hf_config)
        if heads is None:
            return rows
        neighbours = rows.unflatten(0, (heads, -1, 2))
        return neighbours.transpose(1, 2).reshape(rows.shape)

    def _heads(self, name: str, hf_config: dict[str, Any]) -> int | None:
        if not self.reordered:
            return None
        counts = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        layer = next((part for part in name.split(".") if part in counts), None)
        return numbers(hf_config)[counts[layer]] if layer else None


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
        QWEN2_TENSORS,
        reordered=False,
        slides=lambda numbers, layer: layer >= numbers["max_window_layers"],
        defaults={"num_key_value_heads": 32, "max_window_layers": 28},
    ),
    "gemma2": Family(
        ("GEMMA2",),
        GEMMA2_TENSORS,
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
        PHI3_TENSORS,
        reordered=False,
        slides=lambda numbers, layer: True,
        defaults={"rms_norm_eps": 1e-5},
    ),
}


def _template(name: str) -> tuple[str, str]:
    """("7", "layers.{}.attn...") of a name; ("", name) of one outside the layers."""
    found = re.search(r"(?<=layers\.)\d+(?=\.)", name)
    if not found:
        return "", name
    return found[0], name[: found.start()] + "{}" + name[found.end() :]


def read_hf_config(folder: Path) -> dict[str, Any]:
    """config.json of a Hugging Face model folder; raises ConfigError where it is missing."""
    content = read_json(folder / "config.json")
    if not isinstance(content, dict):
        raise ConfigError(
            f"checkpointer.checkpoint_dir: {folder / 'config.json'} is missing or no JSON; "
            "give a Hugging Face model folder"
        )
    return content


def of(hf_config: dict[str, Any]) -> Family:
    """The family of a model by its config.json; raises ConfigError where it is not known."""
    kind = hf_config.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(
            f"checkpointer.checkpoint_dir: config.json has model_type {kind!r}, which is not "
            f"supported; known: {', '.join(FAMILIES)}"
        )
    return FAMILIES[kind]


def model_type_faults(checkpointer: dict[str, Any], hf_config: dict[str, Any]) -> list[str]:
    """Whether a `checkpointer` block names the family that the folder holds."""
    named, family = checkpointer.get("model_type"), of(hf_config)
    if named is None or named in family.model_types:
        return []
    return [
        f"checkpointer.model_type: {named} does not belong to the folder's "
        f"{hf_config['model_type']} model; set it to {' or '.join(family.model_types)}"
    ]


def numbers(hf_config: dict[str, Any]) -> dict[str, Any]:
    """config.json with transformers' defaults, its rotary settings on the top level.

    Raises:
        ConfigError: the family is not known, or a size is missing.
    """
    found = DEFAULTS | of(hf_config).defaults | hf_config
    missing = [
        f"checkpointer.checkpoint_dir: config.json has no {key}; download the model again"
        for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
        if not isinstance(found.get(key), int)
    ]
    if missing:
        raise ConfigError(*missing)
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    found["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    found["rope_theta"] = rope.get("rope_theta", hf_config.get("rope_theta", 10_000))
    found["partial_rotary_factor"] = rope.get(
        "partial_rotary_factor", hf_config.get("partial_rotary_factor", 1.0)
    )
    scaled = found["rope_type"] == "llama3"
    # Llama 3.1's scaling by a factor of 1 is none.
    found["factor"] = rope.get("factor") if scaled else 1
    for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        found[key] = rope.get(key) if scaled else None
    heads = found["num_attention_heads"]
    found["num_key_value_heads"] = found.get("num_key_value_heads") or heads
    found["head_dim"] = found.get("head_dim") or found["hidden_size"] // heads
    found["hidden_act"] = found.get("hidden_activation") or found["hidden_act"]
    if hf_config["model_type"] == "qwen2" and not hf_config.get("use_sliding_window"):
        found["sliding_window"] = None
    return found


@dataclass(frozen=True)
class Setting:
    """A number of config.json (`key`), and where a built model holds it.

    The modules of the types `owners` have it as `attribute`, to the power of `power`; a builder
    may take it as `argument`.
    """

    key: str
    argument: str
    owners: tuple[type, ...]
    attribute: str
    power: float = 1.0

    def fit(self, module: nn.Module, given: Any, arguments: Container[str]) -> list[str]:
        """Set it to config.json's, or tell that the builder must be given it."""
        wanted = given if given is None or self.power == 1 else given**self.power
        for owner in (m for m in module.modules() if isinstance(m, self.owners)):
            built = getattr(owner, self.attribute)
            if _equal(built, wanted):
                continue
            if self.argument in arguments:
                shown = built if self.power == 1 else round(built ** (1 / self.power), 6)
                return [_differs(self.key, shown, given, f"set model.{self.argument}={given}")]
            setattr(owner, self.attribute, wanted)
        return []


SETTINGS = (
    Setting("rms_norm_eps", "norm_eps", (RMSNorm, GemmaRMSNorm), "eps"),
    Setting("rope_theta", "rope_base", ROPES, "base"),
    Setting("factor", "scale_factor", (Llama3ScaledRoPE,), "scale_factor"),
    Setting("attn_logit_softcapping", "hidden_capping_value", (Gemma2Attention,), "softcapping"),
    Setting("final_logit_softcapping", "final_capping_value", (Gemma2FinalNorm,), "capping_value"),
    Setting(
        "query_pre_attn_scalar", "query_pre_attn_scalar", (Gemma2Attention,), "scaling", power=-0.5
    ),
)
# Only where config.json has Llama 3.1's scaling.
SCALING = (
    Setting("low_freq_factor", "low_freq_factor", (Llama3ScaledRoPE,), "low_freq_factor"),
    Setting("high_freq_factor", "high_freq_factor", (Llama3ScaledRoPE,), "high_freq_factor"),
    Setting(
        "original_max_position_embeddings",
        "old_context_len",
        (Llama3ScaledRoPE,),
        "old_context_len",
    ),
)


def fit(
    module: TransformerDecoder, hf_config: dict[str, Any], arguments: Container[str]
) -> list[str]:
    """Make a built model compute what transformers computes for this config.json.

    Args:
        module: on the meta device, as its builder gave it; changed in place.
        arguments: what the builder can be told; there the caller's value counts, and must agree.

    Returns:
        What differs and cannot be made equal, one line a reason.
    """
    given = numbers(hf_config)
    faults = _structure_faults(module, given) + _refusals(given)
    settings = SETTINGS + (SCALING if given["rope_type"] == "llama3" else ())
    for setting in settings:
        if setting.key in given:
            faults += setting.fit(module, given[setting.key], arguments)
    faults += _fit_windows(module, given, arguments)
    _cap_logits(module)
    return faults


def _refusals(given: dict[str, Any]) -> list[str]:
    """What no torchtune builder can represent."""
    place = "checkpointer.checkpoint_dir: config.json"
    faults = []
    if given["rope_type"] not in ("default", "llama3"):
        faults.append(
            f"{place} has rope type {given['rope_type']!r}, which is not supported; "
            "choose a model whose rope type is default or llama3"
        )
    if given["partial_rotary_factor"] != 1:
        faults.append(
            f"{place} has partial_rotary_factor {given['partial_rotary_factor']}, and only whole "
            "heads are rotated here; choose another model"
        )
    if given.get("use_bidirectional_attention"):
        faults.append(f"{place} has bidirectional attention; choose a causal model")
    kinds = set(given.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        faults.append(f"{place} has layer types {sorted(kinds)}; choose another model")
    return faults


def _structure_faults(module: TransformerDecoder, given: dict[str, Any]) -> list[str]:
    """Where the builder gave another kind of model than config.json has."""
    attention, mlp = module.layers[0].attn, module.layers[0].mlp
    rope = attention.pos_embeddings
    pairs = {
        "num_hidden_layers": (len(module.layers), given["num_hidden_layers"]),
        "num_attention_heads": (attention.num_heads, given["num_attention_heads"]),
        "num_key_value_heads": (attention.num_kv_heads, given["num_key_value_heads"]),
        "head_dim": (attention.head_dim, given["head_dim"]),
        "activation": (_activation(mlp), given["hidden_act"]),
        "tie_word_embeddings": (
            isinstance(module.output, TiedLinear),
            bool(given["tie_word_embeddings"]),
        ),
        "rotated pairs": (
            "neighbours" if isinstance(rope, NEIGHBOURS) else "halves",
            "neighbours" if FAMILIES[given["model_type"]].reordered else "halves",
        ),
    }
    if given["rope_type"] == "llama3":
        built = "llama3" if isinstance(rope, Llama3ScaledRoPE) else "default"
        pairs["rope type"] = (built, "llama3")
    return [_differs(key, *pair) for key, pair in pairs.items() if pair[0] != pair[1]]


def _activation(mlp: FeedForward) -> str:
    if isinstance(mlp.activation, nn.GELU):
        return "gelu_pytorch_tanh" if mlp.activation.approximate == "tanh" else "gelu"
    return type(mlp.activation).__name__.lower()


def _differs(key: str, built: Any, given: Any, advice: str = "") -> str:
    advice = advice or "choose the builder that belongs to checkpointer.checkpoint_dir"
    return f"model: the builder has {key} {built}, the model's config.json has {given}; {advice}"


def _equal(left: Any, right: Any) -> bool:
    if left is None or right is None:
        return left is right
    return math.isclose(left, right, rel_tol=1e-9)


def _fit_windows(
    module: TransformerDecoder, given: dict[str, Any], arguments: Container[str]
) -> list[str]:
    """Give each layer's attention the window that config.json gives it.

    torchtune's Mistral, Phi 3 and Qwen 2 see the whole sequence; trainer.attention heeds it.
    """
    window = given["sliding_window"]
    family, kinds = FAMILIES[given["model_type"]], given.get("layer_types")
    for index, layer in enumerate(module.layers):
        slides = kinds[index] == "sliding_attention" if kinds else family.slides(given, index)
        wanted = window if slides else None
        built = getattr(layer.attn, "sliding_window_size", None)
        if "sliding_window_size" in arguments and built and wanted and built != wanted:
            return [
                _differs("sliding_window", built, wanted, f"set model.sliding_window_size={wanted}")
            ]
        # A window that no sequence is longer than needs no mask.
        wanted = wanted if wanted and wanted < module.max_seq_len else None
        layer.attn.sliding_window_size = wanted
    return []


class CappedTiedLinear(TiedLinear):
    """The embedding as output layer, its logits x as cap * tanh(x / cap), in fp32.

    Source: Gemma 2 (arXiv 2408.00118), section 2.
    """

    def __init__(self, tied_module: nn.Module, softcap: float) -> None:
        super().__init__(tied_module)
        self.softcap = softcap

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().__call__(x).float() / self.softcap) * self.softcap


def _cap_logits(module: TransformerDecoder) -> None:
    # torchtune's Gemma 2 caps the last hidden state; Gemma 2 caps the logits made of it.
    final = module.norm
    if isinstance(final, Gemma2FinalNorm):
        module.norm = final.rms_norm
        if final.capping_value is not None:
            module.output = CappedTiedLinear(module.tok_embeddings, final.capping_value)
