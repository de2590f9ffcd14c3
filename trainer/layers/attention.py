"""Attention in which no document of a packed row sees another one."""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

# At import: activation checkpointing keeps the results of this operator, and looks for it when a
# layer is prepared.
from torch.nn.attention.varlen import varlen_attn

from trainer.layers import flex
from trainer.model import Documents, Inputs

# FlashAttention-2: Ampere and later, half precision, at most 256 features per head.
FLASH_CAPABILITY = (8, 0)
FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_HEAD_DIM, FLASH_HEAD_MULTIPLE = 256, 8
# What torch can put in its place: the package, and the compute capabilities (its _fa3.py, _fa4.py).
REPLACEMENTS = {"FA3": ("flash_attn_interface", (9,)), "FA4": ("flash_attn.cute", (9, 10))}

Mask: TypeAlias = Documents | flex.BlockMasks | torch.Tensor | None


class DocumentAttention(nn.Module):
    """Causal scaled dot-product attention over heads, document by document.

    The attention layers of a decoder call it with their heads. `choose_kernels` sets which kernel
    it uses.

    Args:
        head_dim: features per head.
        scale: of the scores; None is 1 / sqrt(head_dim).
        window: number of tokens that a token sees, itself included; None sees all before it (the
            bound of transformers.masking_utils.sliding_window_overlay).
        softcap: scores x become softcap * tanh(x / softcap), as in Gemma 2 (arXiv 2408.00118).
        dropout: probability, in training.
        value_dim: features per head of the values; None is head_dim.
        sinks: each head has a score of its own, which takes its share of the softmax and has no
            value, as in gpt-oss (arXiv 2309.17453 has the idea).
    """

    def __init__(
        self,
        head_dim: int,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
        value_dim: int | None = None,
        sinks: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim, self.scale, self.window = head_dim, scale, window
        self.value_dim, self.sinks = head_dim if value_dim is None else value_dim, sinks
        self.softcap, self.dropout = softcap, dropout
        self.varlen_attention: Callable[..., torch.Tensor] | None = None
        self.flex_attention: Callable[..., torch.Tensor] | None = None
        self.on_cpu = False
        # Keys before each document that an adapter has added and switched on.
        self.prefix_length, self.adapter_enabled = 0, False

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Mask = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return [batch, sequence, heads, value_dim] for a query [..., heads, head_dim].

        Args:
            key, value: the same with the same number of heads, or fewer that divide it.
            mask: the documents, their block masks, a boolean [batch, sequence, sequence], or None
                if each row is one document.
            sinks: the sinks' scores, [heads].
        """
        if isinstance(mask, flex.BlockMasks):
            if self.flex_attention is None:
                raise RuntimeError("block masks are FlexAttention's, which was not chosen")
            heads, blocks = (query, key, value), mask.by_window[self.window]
            return flex.attend(self.flex_attention, heads, blocks, self.softcap, self.scale, sinks)
        if isinstance(mask, Documents):
            if self.varlen_attention is not None:
                # No document is longer than the row, a constant that is known without waiting.
                flat = (t.flatten(0, 1) for t in (query, key, value))
                bounds, longest = mask.cu_seqlens, query.shape[1]
                output = self.varlen_attention(*flat, bounds, bounds, longest, longest)
                return output.unflatten(0, query.shape[:2])
            if self._goes_one_by_one(sinks):
                return self._one_by_one(query, key, value, mask)
            mask = mask.mask()
        mask = with_window(mask, self.window, query.shape[1], query.device)
        return self.dense(query, key, value, mask, sinks)

    def _goes_one_by_one(self, sinks: torch.Tensor | None) -> bool:
        """Whether documents are computed one after another: on a CPU, which few tokens keep busy.

        A compiled layer has no loop over a number that each batch changes.
        """
        fits = self.softcap is None and sinks is None and not (self.training and self.dropout)
        return fits and self.on_cpu and not torch.compiler.is_compiling()

    def _one_by_one(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents
    ) -> torch.Tensor:
        """[batch, sequence, heads, dim]: a mask of whole rows computes what no document sees."""
        lengths = documents.cu_seqlens.diff().tolist()
        repeats = query.shape[2] // key.shape[2]
        heads = (query, _repeated(key, repeats), _repeated(value, repeats))
        # All that is done to whole rows is done before: on a CPU each operator of each document
        # costs about as long as the attention of a short one.
        parts = zip(
            *(t.flatten(0, 1).transpose(0, 1).unsqueeze(0).split(lengths, 2) for t in heads),
            strict=True,
        )
        outputs = [
            self._kernel(*own, mask=with_window(None, self.window, length, query.device))
            for own, length in zip(parts, lengths, strict=True)
        ]
        return torch.cat(outputs, 2).squeeze(0).transpose(0, 1).unflatten(0, query.shape[:2])

    def dense(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The same with a boolean mask [batch, queries, keys]; None is causal, without a window."""
        if self.softcap is None and sinks is None:
            return self._sdpa(query, key, value, mask)
        return self._textbook(query, key, value, mask, sinks)

    def _sdpa(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        repeats = query.shape[2] // key.shape[2]
        # Only the flash kernel shares key heads without copies; elsewhere sharing is slower.
        grouped = repeats > 1 and mask is None and query.is_cuda and query.dtype in FLASH_DTYPES
        if not grouped:
            key, value = _repeated(key, repeats), _repeated(value, repeats)
        heads = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return self._kernel(*heads, mask=mask, grouped=grouped).transpose(1, 2)

    def _kernel(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        mask: torch.Tensor | None,
        grouped: bool = False,
    ) -> torch.Tensor:
        """torch's attention, [batch, heads, sequence, dim]; grouped: key heads are shared."""
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if mask is None else mask.unsqueeze(1),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=grouped,
        )

    def _textbook(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """The formula, with soft cap and sinks, which holds all scores at once."""
        repeats, length = query.shape[2] // key.shape[2], query.shape[1]
        key, value = (_repeated(t, repeats).transpose(1, 2) for t in (key, value))
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        scores = (query.transpose(1, 2) * scale) @ key.transpose(2, 3)
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if mask is None:
            mask = torch.ones(1, length, length, dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~mask.unsqueeze(1), -torch.inf).float()
        if sinks is not None:
            column = sinks.float().view(-1, 1, 1).expand(scores.shape[0], -1, length, 1)
            scores = torch.cat([scores, column], -1)
        shares = scores.softmax(-1)[..., : key.shape[2]].to(query.dtype)
        if self.training and self.dropout:
            shares = F.dropout(shares, self.dropout)
        return (shares @ value).transpose(1, 2)

    def fits_flash(self, dtype: torch.dtype) -> bool:
        """Whether the variable-length flash kernel computes the same."""
        return (
            # No fused kernel caps the scores before the softmax.
            self.softcap is None
            # FlexAttention has keys before each document.
            and not self.prefix_length
            and not self.sinks
            and self.value_dim == self.head_dim
            and self.scale is None
            and dtype in FLASH_DTYPES
            and self.dropout == 0.0
            and self.head_dim <= FLASH_HEAD_DIM
            and self.head_dim % FLASH_HEAD_MULTIPLE == 0
        )


def layers(model: nn.Module) -> list[DocumentAttention]:
    """Return every `DocumentAttention` of a model."""
    return [module for module in model.modules() if isinstance(module, DocumentAttention)]


def choose_kernels(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Choose the kernels of the attention layers of `model`, in place.

    On a GPU packed rows go through flash attention's variable-length kernel, or through
    FlexAttention if that does not fit: with a soft cap (Gemma 2) or sinks (gpt-oss), with latent
    attention (DeepSeek V3), in fp32, on an older GPU. On a CPU they go one by one, and through a
    block-diagonal mask where that is not possible, as with dropout or if the layers are compiled.

    Args:
        model: after tensor parallelism.
        device: the device that it will run on.
        dtype: the dtype that it will compute in.
    """
    if device.type != "cuda":
        for layer in layers(model):
            layer.on_cpu = True
        return
    if torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY:
        use_flash_attention(model, dtype)
    without_kernel = any(layer.varlen_attention is None for layer in layers(model))
    if without_kernel and not any(layer.dropout for layer in layers(model)):
        use_flex_attention(model, device)


def replace_flash_attention(name: str, device: torch.device) -> str | None:
    """Let torch's flash attention be FlashAttention 3 or 4 from here on; or return what is missing.

    All operators of torch's that are made of it change: of packed rows and of others.
    """
    package, capabilities = REPLACEMENTS[name]
    if device.type != "cuda":
        return "there is no GPU"
    if (major := torch.cuda.get_device_capability(device)[0]) not in capabilities:
        needed = " or ".join(map(str, capabilities))
        return f"it needs compute capability {needed}, and this GPU has {major}"
    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        return f"torch {torch.__version__} cannot use it; 2.13 can"
    try:
        torch.nn.attention.activate_flash_attention_impl(name)
    except (ImportError, RuntimeError) as error:
        return f"its package {package} cannot be used ({error})"
    return None


def use_flash_attention(model: nn.Module, dtype: torch.dtype) -> None:
    """Let packed rows go through the variable-length kernel in the layers that it fits.

    It runs on GPUs with flash attention, and on fake tensors.
    """
    for layer in layers(model):
        if layer.fits_flash(dtype):
            layer.varlen_attention = varlen_attention(layer.window)


def use_flex_attention(model: nn.Module, device: torch.device) -> None:
    """Let the attention layers use FlexAttention, with block masks made for each batch."""
    for layer in layers(model):
        layer.flex_attention = flex.kernel(device)
    windows = {layer.window for layer in layers(model)}
    # Rows that are not packed need block masks only for what no causal kernel does.
    always = windows != {None} or any(
        layer.softcap is not None or layer.sinks for layer in layers(model)
    )

    def make_block_masks(_: nn.Module, args: tuple[Inputs, ...], kwargs: dict[str, Any]) -> Any:
        tokens, documents = args[0].tokens, args[0].documents
        prefix = max(each.prefix_length * each.adapter_enabled for each in layers(model))
        if documents is None and not always and not prefix:
            return None
        ids, bounds = tokens.new_zeros(tokens.shape, dtype=torch.int32), None
        if isinstance(documents, Documents):
            ids, bounds = documents
        masks = flex.block_masks(ids, windows, prefix)._replace(cu_seqlens=bounds)
        return (args[0]._replace(documents=masks),), kwargs

    model.register_forward_pre_hook(make_block_masks, with_kwargs=True)


@cache
def varlen_attention(window: int | None = None) -> Callable[..., torch.Tensor]:
    """Return torch's variable-length attention, [tokens, heads, head_dim]."""
    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    # The kernel always shares key heads; torch 2.13 has an option for it, and 2.11 has none.
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    return partial(varlen_attn, **options)


def with_window(
    mask: torch.Tensor | None, window: int | None, length: int, device: torch.device
) -> torch.Tensor | None:
    """Return the boolean mask of rows of this length with a sliding window; None is causal."""
    if window is None or length <= window:
        return mask
    position = torch.arange(length, device=device)
    distance = position[:, None] - position
    near = ((distance >= 0) & (distance < window)).unsqueeze(0)
    return near if mask is None else mask & near


def _repeated(tensor: torch.Tensor, repeats: int) -> torch.Tensor:
    """[batch, sequence, key heads, head_dim] with each head `repeats` times."""
    if repeats == 1:
        return tensor
    return tensor.unsqueeze(3).expand(*tensor.shape[:3], repeats, -1).flatten(2, 3)
