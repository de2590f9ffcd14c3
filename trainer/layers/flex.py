"""FlexAttention, for what no fused kernel has: soft caps, windows, documents, any GPU.

torch compiles one kernel from a score_mod and a mask_mod. Blocks of keys that no query of a block
sees are not computed. Which these are follows from the documents' ids alone, so that no mask of
[sequence, sequence] is ever made.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

BLOCK = 128
# Rows of less than 128 tokens would else go to the decoding kernel, which cannot be compiled for
# blocks of this size (torch 2.11).
KERNEL_OPTIONS = {"BACKEND": "TRITON"}


class BlockMasks(NamedTuple):
    """The block masks of a batch, one for each window that its layers have or None; and of its
    documents what `Documents` has: cu_seqlens is None if each row is one."""

    by_window: dict[int | None, BlockMask]
    ids: torch.Tensor
    cu_seqlens: torch.Tensor | None = None


def block_masks(
    document_ids: torch.Tensor, windows: set[int | None], prefix: int = 0
) -> BlockMasks:
    """Return the block masks of a batch for layers with these windows.

    Args:
        document_ids: int32 [batch, sequence], ascending within each row.
        prefix: keys that stand before each document; they lie behind the row, see `with_prefix`.
    """
    masks = {window: _block_mask(document_ids, window, prefix) for window in windows}
    return BlockMasks(masks, document_ids)


def with_prefix(row: torch.Tensor, prefix: torch.Tensor) -> torch.Tensor:
    """Keys or values [batch, sequence, heads, width], filled up to whole blocks, and the prefix's.

    Args:
        prefix: [tokens, heads, width].
    """
    filled = torch.nn.functional.pad(row, (0, 0, 0, 0, 0, -row.shape[1] % BLOCK))
    return torch.cat([filled, prefix.expand(row.shape[0], -1, -1, -1)], 1)


def _block_mask(ids: torch.Tensor, window: int | None, prefix: int) -> BlockMask:
    """A query sees keys of its document that are not after it and less than `window` before it.

    It sees the prefix as if that stood before its document. The first and last tokens of blocks
    tell which blocks are left out, and which are full: those need no mask_mod.
    """
    length = ids.shape[1]
    first = torch.arange(0, length, BLOCK, device=ids.device)
    last = (first + BLOCK - 1).clamp(max=length - 1)
    lowest, highest = ids[:, first], ids[:, last]
    # Of [batch, query block, key block]: how far back the keys are, and whose document is whose.
    seen = (first <= last[:, None]) & (highest[:, None, :] >= lowest[:, :, None])
    full = (last <= first[:, None]) & (lowest[:, None, :] == highest[:, :, None])
    if window is not None:
        seen = seen & (first[:, None] - last < window)
        full = full & (last[:, None] - first < window)
    seen, keys, mask_mod = seen & ~full, length, _mask_mod(ids, window)
    if prefix:
        blocks = seen.new_ones(*seen.shape[:2], -(-prefix // BLOCK))
        seen, full = torch.cat([seen, blocks], 2), torch.cat([full, blocks & False], 2)
        keys = length + -length % BLOCK
        mask_mod = _prefix_mod(ids, window, keys, prefix)
        keys += prefix
    partial_blocks, full_blocks = (_indices(part) for part in (seen, full))
    return BlockMask.from_kv_blocks(
        *partial_blocks,
        *full_blocks,
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(length, keys),
    )


def _indices(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of chosen key blocks per query block, and the indices with these first; one head."""
    indices = chosen.int().argsort(dim=2, descending=True, stable=True)
    return chosen.sum(2, dtype=torch.int32)[:, None], indices.int()[:, None]


def _mask_mod(ids: torch.Tensor, window: int | None) -> Callable[..., torch.Tensor]:
    def sees(row: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        seen = (query >= key) & (ids[row, query] == ids[row, key])
        return seen if window is None else seen & (query - key < window)

    return sees


def _prefix_mod(
    ids: torch.Tensor, window: int | None, begin: int, prefix: int
) -> Callable[..., torch.Tensor]:
    """As `_mask_mod` with `prefix` keys from the one at `begin` on; padding is before it."""
    length = ids.shape[1]
    place = torch.arange(length, device=ids.device)
    begins = torch.nn.functional.pad(ids.diff(dim=1) != 0, (1, 0), value=True)
    position = place - torch.where(begins, place, 0).cummax(1).values
    within = _mask_mod(ids, window)

    def sees(row: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        own = (key < length) & within(row, head, query, key.clamp(max=length - 1))
        before = (key >= begin) & (key < begin + prefix)
        if window is not None:
            before = before & (position[row, query] + prefix - (key - begin) < window)
        return own | before

    return sees


def _score_mod(softcap: float) -> Callable[..., torch.Tensor]:
    """Scores x become softcap * tanh(x / softcap): Gemma 2 (arXiv 2408.00118), section 2."""

    def score(value: torch.Tensor, *indices: Any) -> torch.Tensor:
        return softcap * torch.tanh(value / softcap)

    return score


@cache
def kernel(device: torch.device) -> Callable[..., torch.Tensor]:
    """Return FlexAttention for `device`: not compiled on a CPU, where it makes all scores."""
    if device.type != "cuda":
        return flex_attention
    # One kernel for each window, length or all lengths, with gradients or not: beyond the limit
    # all scores would be made.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
    # As one operator, whose results activation checkpointing by operation can keep.
    return torch.compile(flex_attention, options={"wrap_inductor_compiled_regions": True})


def attend(
    kernel: Callable[..., torch.Tensor],
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: BlockMask,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention over [batch, sequence, heads, head_dim], in the query's shape.

    Args:
        kernel: from `kernel`.
        heads: query, key and value; key and value may have fewer heads.
        scale: of the scores; None is 1 / sqrt(head_dim).
        sinks: [heads], scores without a value. With Z = sum of exp(scores) and a sink s the
            softmax's divisor is Z + exp(s), so that the output is sigmoid(log Z - s) times that
            without sinks.
    """
    heads = tuple(tensor.transpose(1, 2) for tensor in heads)
    attended = kernel(
        *heads,
        score_mod=None if softcap is None else _score_mod(softcap),
        block_mask=mask,
        scale=scale,
        enable_gqa=heads[0].shape[1] != heads[1].shape[1],
        kernel_options=KERNEL_OPTIONS,
        # torch 2.13 warns once of its older name, and compiles again what it compiled before that.
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is None:
        return attended.transpose(1, 2)
    output, aux = attended
    shares = torch.sigmoid(aux.lse - sinks.float().view(-1, 1)).unsqueeze(-1)
    return (output * shares.to(output.dtype)).transpose(1, 2)
