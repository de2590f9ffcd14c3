"""A model folder as transformers opens it to answer: its class, its length, how its answers end."""

from pathlib import Path
from typing import Any

import torch

from plugins.evaluate import spread
from runspec.storage import patiently
from trainer.data.folder import answer_end


def load(folder: Path, dtype: torch.dtype | str, device: torch.device, ranks: int) -> Any:
    """The model, on `device`; all `ranks` call this together.

    A larger model's text part answers in the larger model's class where it has none of its own.

    Raises:
        ConfigError: the model's class cannot be spread, or has fewer layers than ranks.
        OSError, ValueError: transformers cannot load it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    known = type(patiently(AutoConfig.from_pretrained, folder)) in MODEL_FOR_CAUSAL_LM_MAPPING
    kind = AutoModelForCausalLM if known else AutoModelForImageTextToText
    return spread.load(kind, folder, dtype, device, ranks)


def positions(model: Any) -> int:
    """How many tokens it takes."""
    config = model.config.get_text_config()
    return int(getattr(config, "max_position_embeddings", 0) or 2**20)


def ends(model: Any, tokenizer: Any, chat: bool = True) -> tuple[list[int], int | None]:
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


def be_greedy(model: Any, end_ids: list[int], pad_id: int | None) -> None:
    """Let `generate` take the likeliest token, whatever the folder's generation config says."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=end_ids or None, pad_token_id=pad_id
    )
