"""Making torchtune's builders compute what a model folder's config.json says.

config.json is the truth about a model. A number that no tensor's shape shows (a RoPE base, an
epsilon, a soft cap, a window) must agree with it if the builder takes it as an argument, and is
taken from it if the builder has no such argument.
"""

import math
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchtune.models.gemma.rms_norm import GemmaRMSNorm
from torchtune.models.llama3_1 import Llama3ScaledRoPE
from torchtune.models.phi3 import Phi3RotaryPositionalEmbeddings
from torchtune.models.qwen2 import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import FeedForward, RMSNorm, RotaryPositionalEmbeddings

from runspec.keys.train import ModelSpec
from trainer.config import arguments_of
from trainer.layers.attention import DocumentAttention
from trainer.model import Decoder
from trainer.models.torchtune import hub

LLAMA3 = (Llama3ScaledRoPE,)
INTERLEAVED = (RotaryPositionalEmbeddings, *LLAMA3)
OTHERS = (Phi3RotaryPositionalEmbeddings, Qwen2RotaryPositionalEmbeddings)


def fit(model: Decoder, hf_config: dict[str, Any], spec: ModelSpec) -> list[str]:
    """Make a model compute what transformers computes for this config.json.

    Args:
        model: on the meta device, as its builder gave it; changed in place.
        spec: its `checkpointer.model_type` must name the folder's family. For what the builder
            takes as an argument the recipe's value counts, and must agree with config.json.

    Returns:
        What differs and cannot be made equal, one line per fault.

    Raises:
        ConfigError: the family is not known, or config.json lacks a size.
    """
    faults = _model_type_faults(spec.checkpointer, hf_config)
    arguments = arguments_of("model", spec.model)
    given = hub.numbers(hf_config)
    faults += _structure_faults(model, given) + _refusals(given)
    for setting in SETTINGS + (SCALING if given["rope_type"] == "llama3" else ()):
        if setting.key in given:
            faults += setting.fit(model, given[setting.key], arguments)
    return faults + _fit_windows(model, given, arguments)


def _model_type_faults(checkpointer: dict[str, Any], hf_config: dict[str, Any]) -> list[str]:
    named, family = checkpointer.get("model_type"), hub.of(hf_config)
    if named is None or named in family.model_types:
        return []
    return [
        f"checkpointer.model_type: {named} does not belong to the folder's "
        f"{hf_config['model_type']} model; set it to {' or '.join(family.model_types)}"
    ]


@dataclass(frozen=True)
class Setting:
    """A number of config.json, and where a built model holds it."""

    # Its name in config.json.
    key: str
    # A builder may take it as this argument.
    argument: str
    # The types of the modules that have it.
    owners: tuple[type, ...]
    # Their attribute.
    attribute: str
    # The attribute is the number to this power.
    power: float = 1.0

    def fit(self, module: nn.Module, given: Any, arguments: Container[str]) -> list[str]:
        """Set it to config.json's value, or return the argument that the builder needs."""
        wanted = given if given is None or self.power == 1 else given**self.power
        for owner in (m for m in module.modules() if isinstance(m, self.owners)):
            built = getattr(owner, self.attribute)
            if built == wanted or (built and wanted and math.isclose(built, wanted)):
                continue
            if self.argument in arguments:
                shown = built if self.power == 1 else round(built ** (1 / self.power), 6)
                return [_differs(self.key, shown, given, f"set model.{self.argument}={given}")]
            setattr(owner, self.attribute, wanted)
        return []


SETTINGS = (
    Setting("rms_norm_eps", "norm_eps", (RMSNorm, GemmaRMSNorm), "eps"),
    Setting("rope_theta", "rope_base", INTERLEAVED + OTHERS, "base"),
    Setting("factor", "scale_factor", LLAMA3, "scale_factor"),
    Setting("attn_logit_softcapping", "hidden_capping_value", (DocumentAttention,), "softcap"),
    Setting("final_logit_softcapping", "final_capping_value", (Decoder,), "output_softcap"),
    Setting(
        "query_pre_attn_scalar", "query_pre_attn_scalar", (DocumentAttention,), "scale", power=-0.5
    ),
)
# Only if config.json has Llama 3.1's scaling.
SCALING = (
    Setting("low_freq_factor", "low_freq_factor", LLAMA3, "low_freq_factor"),
    Setting("high_freq_factor", "high_freq_factor", LLAMA3, "high_freq_factor"),
    Setting("original_max_position_embeddings", "old_context_len", LLAMA3, "old_context_len"),
)


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
    if kinds := set(given["layer_types"]) - {"full_attention", "sliding_attention"}:
        faults.append(f"{place} has layer types {sorted(kinds)}; choose another model")
    return faults


def _structure_faults(module: Decoder, given: dict[str, Any]) -> list[str]:
    """What the builder made of another kind than config.json has."""
    attention, mlp = module.layers[0].attn, module.layers[0].mlp
    rope, family = attention.pos_embeddings, hub.FAMILIES[given["model_type"]]
    pairs = {
        "num_hidden_layers": (len(module.layers), given["num_hidden_layers"]),
        "num_attention_heads": (attention.num_heads, given["num_attention_heads"]),
        "num_key_value_heads": (attention.num_kv_heads, given["num_key_value_heads"]),
        "head_dim": (attention.head_dim, given["head_dim"]),
        "activation": (_activation(mlp), given["hidden_act"]),
        "tie_word_embeddings": (module.output_head is None, bool(given["tie_word_embeddings"])),
        "interleaved RoPE": (isinstance(rope, INTERLEAVED), family.interleaved),
    }
    if given["rope_type"] == "llama3":
        built = "llama3" if isinstance(rope, LLAMA3) else "default"
        pairs["rope type"] = (built, "llama3")
    return [_differs(key, *pair) for key, pair in pairs.items() if pair[0] != pair[1]]


def _activation(mlp: FeedForward) -> str:
    if isinstance(mlp.activation, nn.GELU):
        return "gelu_pytorch_tanh" if mlp.activation.approximate == "tanh" else "gelu"
    return type(mlp.activation).__name__.lower()


def _differs(key: str, built: Any, given: Any, advice: str = "") -> str:
    advice = advice or "choose the builder that belongs to checkpointer.checkpoint_dir"
    return f"model: the builder has {key} {built}, the model's config.json has {given}; {advice}"


def _fit_windows(module: Decoder, given: dict[str, Any], arguments: Container[str]) -> list[str]:
    """Give the attention of each layer the window that config.json gives it.

    torchtune's Mistral, Phi 3 and Qwen 2 have no windows.
    """
    for kind, layer in zip(given["layer_types"], module.layers, strict=False):
        wanted = given["sliding_window"] if kind == "sliding_attention" else None
        attention = layer.attn.core
        built = attention.window
        if "sliding_window_size" in arguments and built and wanted and built != wanted:
            return [
                _differs("sliding_window", built, wanted, f"set model.sliding_window_size={wanted}")
            ]
        # A window that no sequence is longer than needs no mask.
        attention.window = wanted if wanted and wanted < module.max_seq_len else None
    return []
