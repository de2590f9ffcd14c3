"""Grouped-query attention over packed documents, forward and backward."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchtune.models.gemma2 import gemma2

from benchmarks.parts import documents
from benchmarks.parts.measure import Case, Runnable, Setting, Tensors, Unavailable, Variant, leaf
from benchmarks.parts.measure import compiled as compile_for
from trainer.layers import attention, flex
from trainer.layers.attention import DocumentAttention

GEMMA_SOFT_CAP = 50.0


def cases(setting: Setting) -> Iterator[Case]:
    """Packed rows with head_dim 128 and 64, one document per row, and Gemma 2's attention."""
    size = setting.size
    mixed = documents.lengths(size, seed=1)
    whole = [[size.sequence]] * size.batch
    configs = (
        AttentionConfig("packed, head_dim 128", mixed, size.heads, size.kv_heads, 128),
        AttentionConfig("packed, head_dim 64", mixed, size.heads, size.kv_heads, 64),
        AttentionConfig(
            "one document per row, head_dim 128", whole, size.heads, size.kv_heads, 128
        ),
        # Gemma 2 9B: 16 query and 8 key-value heads; a sliding window in every second layer.
        AttentionConfig(
            "packed, soft-capped logits and sliding window, head_dim 256",
            mixed,
            size.heads // 2,
            max(1, size.heads // 4),
            256,
            soft_cap=GEMMA_SOFT_CAP,
            window=size.sequence // 4,
        ),
    )
    for config in configs:
        yield _case(setting, config)


@dataclass(frozen=True)
class AttentionConfig:
    """Document lengths of each row, heads, and optional soft cap and sliding window."""

    name: str
    rows: list[list[int]]
    heads: int
    kv_heads: int
    head_dim: int
    soft_cap: float | None = None
    window: int | None = None


def _case(setting: Setting, config: AttentionConfig) -> Case:
    size = setting.size
    query, key, value, grad_output = (
        setting.random(size.batch, size.sequence, heads, config.head_dim, seed=seed)
        for seed, heads in enumerate((config.heads, config.kv_heads, config.kv_heads, config.heads))
    )
    leaves = {"query": leaf(query), "key": leaf(key), "value": leaf(value)}
    variants = [
        Variant("trainer", lambda: _trainer(setting, config, leaves)),
        Variant(
            "trainer, FlexAttention", lambda: _trainer(setting, config, leaves, flex_path=True)
        ),
    ]
    if config.soft_cap is None:
        variants += [
            Variant("SDPA, block-diagonal mask", lambda: _masked(setting, config, leaves)),
            Variant("SDPA, one call per document", lambda: _by_document(config, leaves)),
            Variant("flex_attention, compiled", lambda: _flex(setting, config, leaves)),
            Variant("varlen, max_seqlen known", lambda: _varlen(setting, config, leaves)),
            Variant("varlen, FlashAttention 3", lambda: _varlen(setting, config, leaves, "FA3")),
            Variant("varlen, FlashAttention 4", lambda: _varlen(setting, config, leaves, "FA4")),
        ]
    else:
        variants.append(
            Variant("torchtune, full score matrix", lambda: _eager(setting, config, leaves))
        )
    if len(config.rows[0]) == 1:
        variants.insert(1, Variant("SDPA, causal", lambda: causal(leaves)))
    packed = len(config.rows[0]) > 1
    return Case(
        name=config.name,
        what=(
            f"{size.batch} x {size.sequence} tokens, {config.heads} query and {config.kv_heads} "
            f"key-value heads, head_dim {config.head_dim}; {sum(map(len, config.rows))} documents"
            + (f", {documents.DISTRIBUTION}, seed 1" if packed else "")
            + (f"; soft cap {config.soft_cap:g}, window {config.window}" if config.soft_cap else "")
        ),
        variants=variants,
        reference=lambda: _reference(setting, config, query, key, value, grad_output),
        tolerance=setting.tolerance,
        grad_output=grad_output,
        # Two matrix products forward and four backward, for the query-key pairs that are needed.
        rate=(
            "TFLOP/s",
            12
            * config.heads
            * config.head_dim
            * documents.pairs(config.rows, config.window)
            / 1e12,
        ),
    )


class _FixedProjection(nn.Module):
    """A projection that returns a fixed tensor, so that attention is measured alone."""

    def __init__(self, result: torch.Tensor, clone: bool) -> None:
        super().__init__()
        self.result, self.clone = result, clone

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.result.clone() if self.clone else self.result


def _gemma_layer(config: AttentionConfig, leaves: Tensors) -> nn.Module:
    """torchtune's attention module of Gemma 2 with fixed projections."""
    options: dict[str, Any] = {
        "embed_dim": config.heads * config.head_dim,
        "num_heads": config.heads,
        "num_kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        # torchtune scales Gemma 2's queries in place.
        "q_proj": _FixedProjection(leaves["query"], clone=True),
        "k_proj": _FixedProjection(leaves["key"], clone=False),
        "v_proj": _FixedProjection(leaves["value"], clone=False),
        "output_proj": nn.Identity(),
        "max_seq_len": leaves["query"].shape[1],
    }
    # Its class has no public name.
    with torch.device("meta"):
        model = gemma2(
            vocab_size=2,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=2,
            embed_dim=2,
            intermediate_dim=2,
            max_seq_len=2,
        )
    attention = type(model.layers[0].attn)
    return attention(**options, softcapping=config.soft_cap, sliding_window_size=config.window)


def _call(layer: nn.Module, leaves: Tensors, mask: Any) -> Callable[[], torch.Tensor]:
    shape = leaves["query"].shape
    # Only the shape is used, because the projections return fixed tensors.
    inputs = leaves["query"].detach()[..., 0, :1]
    return lambda: layer(inputs, inputs, mask=mask).view(shape)


def _trainer(
    setting: Setting, config: AttentionConfig, leaves: Tensors, flex_path: bool = False
) -> Runnable:
    """The trainer's attention: the path that it chooses on this device, or FlexAttention."""
    device = setting.device
    gpu = device.type == "cuda"
    figures: dict[str, Any] = {}
    if flex_path and gpu and not setting.compiled:
        raise Unavailable("torch.compile is switched off")
    if flex_path and not gpu:
        leaves, figures = _without_gradient(leaves)
    layer = DocumentAttention(config.head_dim, window=config.window, softcap=config.soft_cap)
    # The hook that creates a batch's BlockMask is registered on a whole model.
    model = nn.ModuleList([layer])
    attention.choose_kernels(model, device, setting.dtype)
    mask: Any = documents.documents(config.rows, device)[0]
    if flex_path or layer.flex_attention is not None:
        attention.use_flex_attention(model, device)
        ids = mask.ids
        mask, seconds = _timed(setting, lambda: flex.block_masks(ids, {config.window}))
        figures["BlockMask creation, ms"] = round(1e3 * seconds, 2)
        path = "flex_attention" if gpu else "flex_attention, not compiled"
    else:
        path = "SDPA with a mask" if layer.varlen_attention is None else "varlen"
    figures["path"] = path
    with_gradient = {name: tensor for name, tensor in leaves.items() if tensor.requires_grad}
    heads = tuple(leaves.values())
    return Runnable(lambda: layer(*heads, mask), with_gradient, figures=lambda: figures)


def _without_gradient(leaves: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """flex_attention on a CPU refuses tensors that require grad."""
    return {n: t.detach() for n, t in leaves.items()}, {"note": "forward only on CPU"}


def _timed(setting: Setting, make: Callable[[], Any]) -> tuple[Any, float]:
    """Result of `make`, which all layers of a batch share, and the seconds of its second call."""
    make()
    if setting.device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    result = make()
    if setting.device.type == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - began


def _eager(setting: Setting, config: AttentionConfig, leaves: Tensors) -> Runnable:
    mask = documents.documents(config.rows, setting.device)[0].mask()
    return Runnable(_call(_gemma_layer(config, leaves), leaves, mask), leaves)


def _masked(setting: Setting, config: AttentionConfig, leaves: Tensors) -> Runnable:
    mask = documents.documents(config.rows, setting.device)[0].mask().unsqueeze(1)
    query, key, value = (tensor.transpose(1, 2) for tensor in leaves.values())
    return Runnable(
        lambda: F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, enable_gqa=True
        ).transpose(1, 2),
        leaves,
    )


def causal(leaves: Tensors) -> Runnable:
    """Plain causal attention, across documents too: correct for one document per row only."""
    query, key, value = (tensor.transpose(1, 2) for tensor in leaves.values())
    return Runnable(
        lambda: F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        ).transpose(1, 2),
        leaves,
    )


def _by_document(config: AttentionConfig, leaves: Tensors) -> Runnable:
    sizes = [length for row in config.rows for length in row]
    shape = leaves["query"].shape

    def one(*parts: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in parts)
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return output.squeeze(0).transpose(0, 1)

    def run() -> torch.Tensor:
        flat = (tensor.flatten(0, 1).split(sizes) for tensor in leaves.values())
        return torch.cat([one(*parts) for parts in zip(*flat, strict=True)]).view(shape)

    return Runnable(run, leaves)


def _flex(setting: Setting, config: AttentionConfig, leaves: Tensors) -> Runnable:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    ids = documents.documents(config.rows, setting.device)[0].ids
    batch, sequence = ids.shape

    def mask_mod(row, head, query, key):
        return (query >= key) & (ids[row, query] == ids[row, key])

    mask, seconds = _timed(
        setting,
        lambda: create_block_mask(mask_mod, batch, None, sequence, sequence, device=setting.device),
    )
    kernel = compile_for(setting, flex_attention)
    figures: dict[str, Any] = {}
    if setting.device.type == "cpu":
        leaves, figures = _without_gradient(leaves)
    figures["BlockMask creation, ms"] = round(1e3 * seconds, 2)
    query, key, value = (tensor.transpose(1, 2) for tensor in leaves.values())
    return Runnable(
        lambda: kernel(query, key, value, block_mask=mask, enable_gqa=True).transpose(1, 2),
        {name: tensor for name, tensor in leaves.items() if tensor.requires_grad},
        figures=lambda: figures,
    )


def _varlen(
    setting: Setting, config: AttentionConfig, leaves: Tensors, implementation: str | None = None
) -> Runnable:
    layer = DocumentAttention(config.head_dim)
    attention.choose_kernels(layer, setting.device, setting.dtype)
    if layer.varlen_attention is None:
        raise Unavailable("needs a GPU with FlashAttention and a 16-bit dtype")
    cu_seqlens = documents.documents(config.rows, setting.device)[0].cu_seqlens
    max_seqlen = max(length for row in config.rows for length in row)
    shape = leaves["query"].shape

    def run() -> torch.Tensor:
        flat = (tensor.flatten(0, 1) for tensor in leaves.values())
        out = layer.varlen_attention(*flat, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
        return out.view(shape)

    if implementation is None:
        return Runnable(run, leaves)
    return Runnable(run, leaves, context=_implementation(implementation))


def _implementation(name: str) -> Callable[[], AbstractContextManager[None]]:
    """Activate another FlashAttention in torch's operators; Unavailable if it is not installed."""
    try:
        from torch.nn.attention import (
            activate_flash_attention_impl,
            restore_flash_attention_impl,
        )
    except ImportError:
        raise Unavailable("this torch has no choice of FlashAttention version") from None

    @contextmanager
    def active() -> Iterator[None]:
        activate_flash_attention_impl(name)
        try:
            yield
        finally:
            restore_flash_attention_impl()

    try:
        with active():
            return active
    except ImportError:
        raise
    except Exception as error:
        raise Unavailable(f"torch refuses it on this machine: {error}") from error


def _reference(
    setting: Setting,
    config: AttentionConfig,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grad_output: torch.Tensor,
) -> Tensors:
    """The textbook formula, one document at a time, so that it needs no mask between documents."""
    shape, repeats = query.shape, query.shape[2] // key.shape[2]
    flat = [t.to(setting.reference_dtype).flatten(0, 1) for t in (query, key, value, grad_output)]
    results: dict[str, list[torch.Tensor]] = {n: [] for n in ("output", "query", "key", "value")}
    begin = 0
    for length in (length for row in config.rows for length in row):
        q, k, v, grad = (t[begin : begin + length] for t in flat)
        q, k, v = leaf(q), leaf(k), leaf(v)
        wide_k, wide_v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, wide_k) / shape[3] ** 0.5
        if config.soft_cap is not None:
            scores = config.soft_cap * torch.tanh(scores / config.soft_cap)
        position = torch.arange(length, device=q.device)
        distance = position[:, None] - position
        masked = (distance < 0) | (distance >= (config.window or length))
        probabilities = scores.masked_fill(masked, -torch.inf).softmax(-1)
        output = torch.einsum("hqk,khd->qhd", probabilities, wide_v)
        gradients = torch.autograd.grad(output, [q, k, v], grad)
        for name, part in zip(results, (output.detach(), *gradients), strict=True):
            results[name].append(part)
        begin += length
    return {
        name: torch.cat(parts).view(*shape[:2], *parts[0].shape[1:])
        for name, parts in results.items()
    }
