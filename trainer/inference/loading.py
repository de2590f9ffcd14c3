"""Models as transformers loads them from a folder: one that answers, or one that gives scores."""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from runspec.storage import patiently
from runspec.weights import base_of, gives_scores, parameter_count, ranks_for
from trainer.data.folder import answer_end
from trainer.errors import ConfigError
from trainer.models.folder_class import load_class, load_config

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def stay_offline_and_quiet() -> None:
    """A model folder is all that is asked for: let transformers look up and report nothing."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()


def is_larger_than_a_gpu(folder: Path, number_bytes: int, device: torch.device) -> bool:
    """Whether a model needs several GPUs of a node; raises ConfigError if it has too few."""
    if device.type != "cuda":
        return False
    memory, found = torch.cuda.get_device_properties(device).total_memory, torch.cuda.device_count()
    needed = ranks_for(parameter_count(folder), number_bytes, memory)
    if needed > found:
        raise ConfigError(
            f"{folder}: needs {needed} GPUs of {memory / 2**30:.0f} GiB, and there are {found}: "
            f"use --gpus-per-node {needed}, or larger GPUs"
        )
    return needed > 1


def language_model(
    folder: Path, dtype: torch.dtype | str, device: torch.device, spread: bool = False
) -> Any:
    """The model that answers, on `device`.

    Args:
        spread: over all GPUs of the node that this process sees, by layers.

    Raises:
        ImportError: `spread` needs the package accelerate.
        OSError, ValueError: transformers cannot load it.
    """
    options = {"dtype": dtype} | ({"device_map": "auto"} if spread else {})
    kind = load_class(load_config(folder))
    model = patiently(lambda path: kind.from_pretrained(str(path), **options), folder)
    return (model if spread else model.to(device)).eval()


def reward_model(folder: Path, dtype: str, device: torch.device) -> Any:
    """The model that gives scores, with its adapter if the folder holds one.

    Args:
        dtype: as in a config, such as bf16.

    Raises:
        ConfigError: the folder has no reward model that transformers can load.
    """
    stay_offline_and_quiet()
    from transformers import AutoModelForSequenceClassification

    if not gives_scores(folder):
        raise ConfigError(f"{folder}: is no reward model (entry: reward makes one)")
    base = base_of(folder)
    try:
        model = AutoModelForSequenceClassification.from_pretrained(
            str(base or folder), num_labels=1, dtype=DTYPES[dtype]
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: transformers cannot load it: {error}") from None
    model = (with_adapter(model, folder) if base else model).to(device).eval()
    # One document at a time ends where its row ends; without it no token is taken for padding.
    model.config.pad_token_id = None
    return model


def with_adapter(model: Any, folder: Path) -> Any:
    """A model with the adapter of a folder; raises ConfigError without the package for it."""
    try:
        from peft import PeftModel
    except ImportError:
        message = f"{folder} is an adapter, which needs the package peft"
        raise ConfigError(f"{message}: pip install peft, or evaluate the merged export") from None
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        tables = [key for key in file.keys() if key.endswith(".embed_tokens.weight")]  # noqa: SIM118
        rows = [file.get_slice(key).get_shape()[0] for key in tables]
    if rows and rows[0] > model.get_input_embeddings().weight.shape[0]:
        # Its new tokens' rows take the place of these.
        model.resize_token_embeddings(rows[0], mean_resizing=False)
    return PeftModel.from_pretrained(model, str(folder))


def end_tokens(model: Any, tokenizer: Any, chat: bool = True) -> tuple[list[int], int | None]:
    """The tokens that end an answer, by generation config, tokenizer and chat template.

    Args:
        chat: its answers are rendered by the chat template.

    Returns:
        All of them, and the one that a text is trained to end with.
    """
    named = model.generation_config.eos_token_id
    known = {*(named if isinstance(named, list) else [named]), tokenizer.eos_token_id} - {None}
    own = answer_end(tokenizer, known) if chat else None
    if own is None:
        return sorted(known), tokenizer.eos_token_id
    return sorted(known | {own}), own


def decode_greedily(model: Any, end_ids: list[int], pad_id: int | None) -> None:
    """Let `generate` take the likeliest token, whatever the folder's generation config says."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=end_ids or None, pad_token_id=pad_id
    )
