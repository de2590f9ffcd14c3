"""Attention in which no document of a packed row sees another one."""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from trainer import flex, forwards
from trainer.compat import Gemma2Attention, MultiHeadAttention, TransformerDecoder

# At once: recomputation keeps this operator's results, and must find it before a layer is prepared.
try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

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


def use_documents(model: TransformerDecoder, device: torch.device, dtype: torch.dtype) -> None:
    """Let the attention layers of `model` take `Documents` as their mask, in place.

    On a GPU packed rows go through flash attention's variable-length kernel, or by blocks where
    that does not serve: where scores are capped (Gemma 2), in fp32, on an older GPU. Elsewhere,
    and with dropout, they go through a block-diagonal mask. Rows that are not packed stay causal.
    In a layer with a `sliding_window_size` a token sees itself and as many tokens before it, less
    one (the bound of transformers.masking_utils.sliding_window_overlay).

    Args:
        model: torchtune's decoder, after tensor parallelism.
        device: where it will run.
        dtype: what it will compute in.
    """
    layers = _layers(model)
    for layer in layers:
        layer.varlen_attention = None
        capped = isinstance(layer, Gemma2Attention)
        forwards.replace(layer, _capped_forward(type(layer).forward) if capped else _forward)
    if device.type != "cuda":
        return
    if torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY:
        use_flash(model, dtype)
    without_kernel = any(layer.varlen_attention is None for layer in layers)
    if without_kernel and not any(layer.attn_dropout for layer in layers):
        use_blocks(model, device)


def _layers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, MultiHeadAttention | Gemma2Attention)]


def use_flash(model: nn.Module, dtype: torch.dtype) -> None:
    """Let packed rows go through the variable-length kernel where it serves, after `use_documents`.

    It runs on GPUs with flash attention, and on fake tensors.
    """
    for layer in _layers(model):
        if _fits_flash(layer, dtype):
            layer.varlen_attention = varlen_attention(_window(layer))


def use_blocks(model: TransformerDecoder, device: torch.device) -> None:
    """Let the attention layers compute by blocks, which are made of each batch's documents."""
    layers = _layers(model)
    for layer in layers:
        flex.prepare(layer, device)
    windows = {_window(layer) for layer in layers}
    # Rows that are not packed need them only for what no causal kernel does.
    always = windows != {None} or any(isinstance(layer, Gemma2Attention) for layer in layers)

    def make_blocks(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        documents = kwargs.get("mask")
        if documents is None and not always:
            return None
        numbers = args[0].new_zeros(args[0].shape, dtype=torch.int32)
        if isinstance(documents, Documents):
            numbers = documents.numbers
        return args, kwargs | {"mask": flex.blocks(numbers, windows)}

    model.register_forward_pre_hook(make_blocks, with_kwargs=True)


def _window(module: nn.Module) -> int | None:
    return getattr(module, "sliding_window_size", None)


def _fits_flash(layer: nn.Module, dtype: torch.dtype) -> bool:
    # No fused kernel caps the scores before the softmax, as Gemma 2 does.
    return (
        isinstance(layer, MultiHeadAttention)
        and dtype in FLASH_DTYPES
        and layer.attn_dropout == 0.0
        and layer.head_dim <= FLASH_HEAD_DIM
        and layer.head_dim % FLASH_HEAD_MULTIPLE == 0
    )


@cache
def varlen_attention(window: int | None = None) -> VarlenAttention | None:
    """(query, key, value, offsets, longest) -> output, all [tokens, heads, head_dim], or None."""
    if varlen_attn is None:
        return None
    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    # The kernel always shares key heads; torch 2.13 wants to be told so, and 2.11 does not ask.
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    return partial(_varlen, partial(varlen_attn, **options))


def _varlen(
    kernel: VarlenAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offsets: torch.Tensor,
    longest: int,
) -> torch.Tensor:
    return kernel(query, key, value, offsets, offsets, longest, longest)


def _forward(
    module: MultiHeadAttention,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    mask: Documents | flex.Blocks | torch.Tensor | None = None,
    input_pos: torch.Tensor | None = None,
) -> torch.Tensor:
    """As torchtune's MultiHeadAttention without a cache: [batch, sequence, dim] to the same.

    Under tensor parallelism q, k and v are this rank's heads.
    """
    query, key, value = heads = _heads(module, x, y, input_pos)
    batch, sequence, _ = x.shape
    if isinstance(mask, flex.Blocks):
        output = flex.attend(module, *heads, mask)
    elif isinstance(mask, Documents) and module.varlen_attention is not None:
        # The row is the longest that a document can be: a constant, read without waiting.
        flat = (t.flatten(0, 1) for t in heads)
        output = module.varlen_attention(*flat, mask.offsets, sequence)
    else:
        dropout = module.attn_dropout if module.training else 0.0
        output = _sdpa(query, key, value, mask, dropout, module.is_causal, _window(module))
    return module.output_proj(output.reshape(batch, sequence, -1))


def _heads(
    module: nn.Module, x: torch.Tensor, y: torch.Tensor, input_pos: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries of x, keys and values of y, all [batch, sequence, heads, head_dim], in position."""
    query, key, value = (
        layer(inputs).view(*inputs.shape[:2], -1, module.head_dim)
        for layer, inputs in ((module.q_proj, x), (module.k_proj, y), (module.v_proj, y))
    )
    if module.pos_embeddings is not None:
        query = module.pos_embeddings(query, input_pos=input_pos)
        key = module.pos_embeddings(key, input_pos=input_pos)
    if module.q_norm is not None:
        query, key = module.q_norm(query), module.k_norm(key)
    return query, key, value


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
def _capped_forward(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """By blocks, or torchtune's own `forward` of a Gemma 2 layer with a boolean mask."""

    def capped(
        module: nn.Module,
        x: torch.Tensor,
        y: torch.Tensor,
        *,
        mask: Documents | flex.Blocks | torch.Tensor | None = None,
        input_pos: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if isinstance(mask, flex.Blocks):
            output = flex.attend(module, *_heads(module, x, y, input_pos), mask)
            return module.output_proj(output.flatten(2))
        if isinstance(mask, Documents):
            mask = mask.mask()
        return forward(module, x, y, mask=mask, input_pos=input_pos)

    return capped
