"""From a model folder's config.json to an empty `Decoder`, or to the reasons against it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from runspec.description import config_file
from trainer.checkpoint.weights import read_hf_config
from trainer.errors import ConfigError
from trainer.models.folder_class import load_class, load_config
from trainer.models.transformers.attention import NAME
from trainer.models.transformers.decoder import PLACE, TransformersDecoder


def empty(folder: Path, rows: Callable[[int], int] | None = None) -> TransformersDecoder:
    """Return the model of `folder` in torch's default dtype; call it on the meta device.

    The class is `load_class`'s. No code of the folder runs.

    Args:
        rows: from the number of rows of the embedding, as config.json says it, to that of the model
            here; None changes nothing.

    Raises:
        ConfigError: no class of transformers' fits, or the trainer cannot train it.
    """
    # The published file serves a look at a model that is not downloaded yet: a check, a trace.
    file = config_file(folder) or folder / "config.json"
    content = read_hf_config(file)
    if faults := _faults(content):
        raise ConfigError(*(f"{PLACE}: {fault}" for fault in faults))
    config = _config(file)
    text = config.get_text_config()
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"{PLACE}: transformers {transformers.__version__} has no causal language model for "
            f"the text part of the {config.model_type} model; choose another model"
        )
    # Whether a part's output is tied is the whole model's to say.
    text.tie_word_embeddings = config.tie_word_embeddings
    if rows is not None:
        text.vocab_size = rows(text.vocab_size)
    attention: Any = NAME
    if text is not config:
        own = [key for key in config.sub_configs if getattr(config, key, None) is text]
        attention = {"": "eager", **dict.fromkeys(own, NAME)}
    try:
        whole = load_class(config).from_config(
            config, attn_implementation=attention, dtype=torch.get_default_dtype()
        )
        return TransformersDecoder(whole)
    except ConfigError:
        raise
    except Exception as error:
        # Any class of any library version: what it raises tells more than a list of ours could.
        reason = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        raise ConfigError(
            f"{PLACE}: the {config.model_type} model cannot be trained: its code does not run in "
            f"the way that the trainer needs ({reason}); choose another model"
        ) from error


def _faults(content: dict[str, Any]) -> list[str]:
    """Why the model of a config.json cannot be trained, as far as its content tells."""
    kind, version = content.get("model_type"), transformers.__version__
    # Going through the classes themselves would import them all.
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and "text_config" not in content:
        if "auto_map" in content:
            return [
                f"the {kind} model needs the code in its folder (auto_map), and code of a folder "
                f"is never run; choose a model whose class transformers {version} has"
            ]
        return [
            f"transformers {version} has no causal language model for config.json's model_type "
            f"{kind!r}; choose another model"
        ]
    faults, text = [], content.get("text_config") or content
    if quantised := content.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        faults.append(
            f"its weights are quantised ({method}); download the bf16 weights of the model, and "
            "set model.quantize_base=True to train over a base in 4 bits"
        )
    if text.get("use_bidirectional_attention"):
        faults.append("it has bidirectional attention; choose a causal model")
    if "dynamic" in (types := _rope_types(text)):
        faults.append(
            f"its rope type {' and '.join(sorted(types))} changes with the longest row of a batch; "
            "choose a model with another one"
        )
    return faults


def _rope_types(content: dict[str, Any]) -> set[str]:
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    blocks = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return {str(block.get("rope_type", block.get("type", "default"))) for block in blocks}


def _config(file: Path) -> PreTrainedConfig:
    try:
        return load_config(file)
    except (ValueError, TypeError, KeyError, OSError, StrictDataclassError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [repr(error)]
        raise ConfigError(
            f"{PLACE}: {file} is refused by transformers: {' '.join(lines[:2])}"
        ) from None
