"""LongRoPE (arXiv 2402.13753), one document at a time."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from trainer.layers.patch import patch_forward


def prepare(model: nn.Module) -> None:
    """Let the LongRoPE tables of `model` go by the length of each document, in place.

    transformers takes its long factors for the whole batch as soon as one row is longer than the
    length that the model was first trained with. In a packed row the longest document would then
    turn the angles of all others.
    """
    for module in model.modules():
        if getattr(module, "rope_type", None) == "longrope":
            module.long_inv_freq = nn.Buffer(module.inv_freq.clone(), persistent=False)
            patch_forward(module, _forward)


def fill(model: nn.Module) -> None:
    """Compute the long factors' buffer where `prepare` has added one."""
    for module in model.modules():
        if getattr(module, "rope_type", None) == "longrope":
            length = _first_length(module)
            values, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, "cpu", seq_len=length + 1)
            module.long_inv_freq.copy_(values)


def _first_length(rope: nn.Module) -> int:
    return rope.config.rope_parameters["original_max_position_embeddings"]


@torch.no_grad()
def _forward(
    rope: nn.Module, x: torch.Tensor, position_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, [batch, sequence, rotated features], in x's dtype.

    A document begins where positions do not go on.
    """
    documents = F.pad(position_ids.diff(dim=1) != 1, (1, 0), value=True).cumsum(1)
    longest = torch.zeros(
        position_ids.shape[0], position_ids.shape[1] + 1, dtype=torch.int64, device=x.device
    ).scatter_reduce(1, documents, position_ids, "amax")
    is_long = longest.gather(1, documents) + 1 > _first_length(rope)
    rates = torch.where(is_long[..., None], rope.long_inv_freq, rope.inv_freq).float()
    angles = position_ids[..., None].float() * rates
    angles = torch.cat((angles, angles), dim=-1)
    scale = rope.attention_scaling
    return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)
