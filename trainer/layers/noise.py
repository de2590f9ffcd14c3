"""NEFTune: noise on the embeddings while training (Jain et al. 2023, arXiv 2310.05914)."""

import math
from typing import Any

import torch

from trainer.models.decoder import Decoder


def add(module: Decoder, alpha: float) -> None:
    """Let the embedding's output of each document get uniform noise in +-alpha / sqrt(n d).

    n is the number of its tokens, d the width; a row that is not packed is one document, with its
    padding, as in transformers' neftune_post_forward_hook. There is none without gradients, as in
    validation and in the reference's pass.
    """
    scale: list[torch.Tensor | float] = [0.0]

    def before(_: Any, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
        documents = kwargs.get("mask")
        if documents is None:
            scale[0] = alpha / math.sqrt(args[0].shape[1] * module.embedding.weight.shape[1])
        else:
            lengths = documents.cu_seqlens.diff()
            count = documents.ids.numel()
            each = lengths.repeat_interleave(lengths, output_size=count)
            wide = each.view(*documents.ids.shape, 1) * module.embedding.weight.shape[1]
            scale[0] = alpha * wide.float().rsqrt()

    def after(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        if not (module.training and torch.is_grad_enabled()):
            return output
        noise = torch.empty_like(output).uniform_(-1, 1)
        return output + (noise * scale[0]).to(output.dtype)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.embedding.register_forward_hook(after)
