"""Attention by blocks, for what no fused kernel has: capped scores, windows, documents, any GPU.

torch's FlexAttention compiles one kernel from a rule for scores and a rule for which keys a query
sees. Blocks of keys that no query of a block sees are not computed; which these are follows from
the documents' numbers alone, so that no mask of [sequence, sequence] is ever made.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128
# Rows of less than 128 tokens would else go to the kernel for decoding, which cannot be compiled
# for blocks of this size (torch 2.11).
KERNEL = {"BACKEND": "TRITON"}


class Blocks(NamedTuple):
    """What `attend` takes as the mask of a batch: by a layer's window (or None), its blocks."""

    by_window: dict[int | None, BlockMask]


def blocks(numbers: torch.Tensor, windows: set[int | None]) -> Blocks:
    """The blocks of a batch for layers with these windows.

    Args:
        numbers: int32 [batch, sequence], the document of each token within its row, ascending.
    """
    return Blocks({window: _block_mask(numbers, window) for window in windows})


def _block_mask(numbers: torch.Tensor, window: int | None) -> BlockMask:
    """Which keys are seen: of the same document, at most `window` - 1 before the query, not after.

    Blocks are left out, or need no rule inside, by their first and last tokens.
    """
    length = numbers.shape[1]
    first = torch.arange(0, length, BLOCK, device=numbers.device)
    last = (first + BLOCK - 1).clamp(max=length - 1)
    lowest, highest = numbers[:, first], numbers[:, last]
    # Of [batch, block of queries, block of keys]: how far back keys lie, whose document is whose.
    seen = (first <= last[:, None]) & (highest[:, None, :] >= lowest[:, :, None])
    whole = (last <= first[:, None]) & (lowest[:, None, :] == highest[:, :, None])
    if window is not None:
        seen = seen & (first[:, None] - last < window)
        whole = whole & (last[:, None] - first < window)
    partial_blocks, whole_blocks = (_listed(part) for part in (seen & ~whole, whole))
    rule = _rule(numbers, window)
    return BlockMask.from_kv_blocks(
        *partial_blocks,
        *whole_blocks,
        BLOCK_SIZE=BLOCK,
        mask_mod=rule,
        seq_lengths=(length, length),
    )


def _listed(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many key blocks each query block has, and their indices before the others', one head."""
    indices = chosen.int().argsort(dim=2, descending=True, stable=True)
    return chosen.sum(2, dtype=torch.int32)[:, None], indices.int()[:, None]


def _rule(numbers: torch.Tensor, window: int | None) -> Callable[..., torch.Tensor]:
    def sees(row: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        seen = (query >= key) & (numbers[row, query] == numbers[row, key])
        return seen if window is None else seen & (query - key < window)

    return sees


@cache
def _capped(cap: float) -> Callable[..., torch.Tensor]:
    """Scores x become cap * tanh(x / cap), as in Gemma 2 (arXiv 2408.00118), section 2."""

    def score(value: torch.Tensor, *place: Any) -> torch.Tensor:
        return cap * torch.tanh(value / cap)

    return score


def prepare(module: nn.Module, device: torch.device) -> None:
    """Give an attention layer what `attend` needs: its rule for scores, and its kernel."""
    cap = getattr(module, "softcapping", None)
    module.score_rule = None if cap is None else _capped(cap)
    # Uncompiled it makes all scores, which only serves to test it where there is no GPU.
    module.flex_attention = _compiled() if device.type == "cuda" else flex_attention


@cache
def _compiled() -> Callable[..., torch.Tensor]:
    # One kernel for each window, length or all lengths, with gradients or not: beyond the limit
    # all scores would be made.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
    return torch.compile(flex_attention)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Blocks,
) -> torch.Tensor:
    """Attention over [batch, sequence, heads, head_dim], which it returns.

    Keys and values may have fewer heads than queries.
    """
    output = module.flex_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        score_mod=module.score_rule,
        block_mask=mask.by_window[getattr(module, "sliding_window_size", None)],
        scale=getattr(module, "scaling", None),
        enable_gqa=query.shape[2] != key.shape[2],
        kernel_options=KERNEL,
    )
    return output.transpose(1, 2)
