"""Attention in which no document of a packed row sees another one."""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from trainer import forwards
from trainer.compat import Gemma2Attention, MultiHeadAttention

# FlashAttention-2: Ampere and later, half precision, heads of up to 256 numbers.
FLASH_CAPABILITY = (8, 0)
FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_HEAD_DIM, FLASH_HEAD_MULTIPLE = 256, 8

VarlenAttention = Callable[..., torch.Tensor]


class Documents(NamedTuple):
    """Which document each token of a packed batch belongs to; given to the model as its mask.

    numbers: int32 [batch, sequence], the document's number within its row; padding counts as one.
    offsets: int32 [documents + 1], where each begins in the flattened batch, and its end.
    """

    numbers: torch.Tensor
    offsets: torch.Tensor

    def mask(self) -> torch.Tensor:
        """Boolean [batch, sequence, sequence]: True where a query (row) may see a key (column)."""
        same = self.numbers.unsqueeze(2) == self.numbers.unsqueeze(1)
        return same.tril()


def use_documents(model: nn.Module, device: torch.device) -> None:
    """Let the attention layers of `model` take `Documents` as their mask, in place.

    On a GPU with flash attention packed rows go through its variable-length kernel; elsewhere,
    and with dropout, through a block-diagonal mask. Rows that are not packed stay causal. In a
    layer with a `sliding_window_size` a token sees itself and as many tokens before it, less one
    (the bound of transformers.masking_utils.sliding_window_overlay).

    Args:
        model: torchtune's decoder, after tensor parallelism.
        device: where it will run.
    """
    kernels: dict[int | None, VarlenAttention | None] = {}
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            window = _window(module)
            if window not in kernels:
                kernels[window] = _varlen_attention(device, window)
            module.varlen_attention = kernels[window]
            forwards.replace(module, _forward)
        elif isinstance(module, Gemma2Attention):
            # It caps the scores before the softmax, which no fused kernel here does.
            forwards.replace(module, _masked_forward(type(module).forward))


def _window(module: MultiHeadAttention) -> int | None:
    return getattr(module, "sliding_window_size", None)


def _varlen_attention(device: torch.device, window: int | None = None) -> VarlenAttention | None:
    """(query, key, value, offsets, longest) -> output, all [tokens, heads, head_dim], or None."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < FLASH_CAPABILITY:
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    # What says "causal" and "fewer key heads" differs between torch 2.11 and 2.13.
    if "window_size" in known:
        options = {"window_size": (-1 if window is None else window - 1, 0)}
    elif window is None:
        options = {"is_causal": True}
    else:
        return None
    return partial(_varlen, partial(varlen_attn, **options), "enable_gqa" in known)


def _varlen(
    kernel: VarlenAttention,
    grouped: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offsets: torch.Tensor,
    longest: int,
) -> torch.Tensor:
    if query.shape[1] == key.shape[1]:
        return kernel(query, key, value, offsets, offsets, longest, longest)
    if grouped:
        return kernel(query, key, value, offsets, offsets, longest, longest, enable_gqa=True)
    repeats = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
    return kernel(query, key, value, offsets, offsets, longest, longest)


def _forward(
    module: MultiHeadAttention,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    mask: Documents | torch.Tensor | None = None,
    input_pos: torch.Tensor | None = None,
) -> torch.Tensor:
    """As torchtune's MultiHeadAttention without a cache: [batch, sequence, dim] to the same.

    Under tensor parallelism q, k and v are this rank's heads.
    """
    batch, sequence, _ = x.shape
    query, key, value = (
        layer(inputs).view(batch, sequence, -1, module.head_dim)
        for layer, inputs in ((module.q_proj, x), (module.k_proj, y), (module.v_proj, y))
    )
    if module.pos_embeddings is not None:
        query = module.pos_embeddings(query, input_pos=input_pos)
        key = module.pos_embeddings(key, input_pos=input_pos)
    if module.q_norm is not None:
        query, key = module.q_norm(query), module.k_norm(key)
    dropout = module.attn_dropout if module.training else 0.0
    varlen = module.varlen_attention
    if isinstance(mask, Documents) and varlen is not None and _fits_flash(query, dropout):
        # The row is the longest that a document can be: a constant, read without waiting.
        flat = (t.flatten(0, 1) for t in (query, key, value))
        output = varlen(*flat, mask.offsets, sequence)
    else:
        output = _sdpa(query, key, value, mask, dropout, module.is_causal, _window(module))
    return module.output_proj(output.reshape(batch, sequence, -1))


def _fits_flash(query: torch.Tensor, dropout: float) -> bool:
    width = query.shape[-1]
    return (
        query.dtype in FLASH_DTYPES
        and dropout == 0.0
        and width <= FLASH_HEAD_DIM
        and width % FLASH_HEAD_MULTIPLE == 0
    )


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Documents | torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    window: int | None = None,
) -> torch.Tensor:
    """Scaled dot-product attention over [batch, sequence, heads, head_dim], which it returns."""
    if isinstance(mask, Documents):
        mask = mask.mask()
    if window is not None and query.shape[1] > window:
        position = torch.arange(query.shape[1], device=query.device)
        distance = position[:, None] - position
        near = ((distance >= 0) & (distance < window)).unsqueeze(0)
        mask = near if mask is None else mask & near
    repeats = query.shape[2] // key.shape[2]
    # Only the flash kernel shares key heads without copies; elsewhere sharing is slower.
    grouped = repeats > 1 and mask is None and query.is_cuda and query.dtype in FLASH_DTYPES
    if repeats > 1 and not grouped:
        shape = (*query.shape[:1], key.shape[1], key.shape[2], repeats, key.shape[3])
        key, value = (t.unsqueeze(3).expand(shape).flatten(2, 3) for t in (key, value))
    output = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=None if mask is None else mask.unsqueeze(1),
        dropout_p=dropout,
        is_causal=mask is None and is_causal,
        **({"enable_gqa": True} if grouped else {}),
    )
    return output.transpose(1, 2)


@cache
def _masked_forward(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """An attention's own forward, called with the boolean mask that `Documents` stand for."""

    def masked(
        module: nn.Module,
        x: torch.Tensor,
        y: torch.Tensor,
        *,
        mask: Documents | torch.Tensor | None = None,
        input_pos: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if isinstance(mask, Documents):
            mask = mask.mask()
        return forward(module, x, y, mask=mask, input_pos=input_pos)

    return masked
