"""Attention over packed documents with fewer key than query heads, forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.parts import documents
from benchmarks.parts.measure import Case, Ready, Setting, Tensors, Unavailable, Variant, leaf
from benchmarks.parts.measure import compiled as compile_for
from trainer import attention, flex
from trainer.compat import Gemma2Attention, MultiHeadAttention

GEMMA_CAP = 50.0


def cases(setting: Setting) -> Iterator[Case]:
    """Packed rows with heads of 128 and of 64, rows of one document, and Gemma 2's attention."""
    size = setting.size
    mixed = documents.lengths(size, seed=1)
    whole = [[size.sequence]] * size.batch
    kinds = (
        Kind("packed, heads of 128", mixed, size.heads, size.kv_heads, 128),
        Kind("packed, heads of 64", mixed, size.heads, size.kv_heads, 64),
        Kind("one document a row, heads of 128", whole, size.heads, size.kv_heads, 128),
        # Of Gemma 2 9B: 16 query heads, 8 key heads, every second layer with a window.
        Kind(
            "packed, capped scores and a window, heads of 256",
            mixed,
            size.heads // 2,
            max(1, size.heads // 4),
            256,
            cap=GEMMA_CAP,
            window=size.sequence // 4,
        ),
    )
    for kind in kinds:
        yield _case(setting, kind)


@dataclass(frozen=True)
class Kind:
    """Rows of documents (tokens each), heads, and what is done to scores."""

    name: str
    rows: list[list[int]]
    heads: int
    kv_heads: int
    head_dim: int
    cap: float | None = None
    window: int | None = None


def _case(setting: Setting, kind: Kind) -> Case:
    size = setting.size
    query, key, value, upstream = (
        setting.random(size.batch, size.sequence, heads, kind.head_dim, seed=seed)
        for seed, heads in enumerate((kind.heads, kind.kv_heads, kind.kv_heads, kind.heads))
    )
    leaves = {"query": leaf(query), "key": leaf(key), "value": leaf(value)}
    variants = [
        Variant("trainer", lambda: _trainer(setting, kind, leaves)),
        Variant("trainer by blocks", lambda: _trainer(setting, kind, leaves, blocks=True)),
    ]
    if kind.cap is None:
        variants += [
            Variant("SDPA, mask of blocks", lambda: _masked(setting, kind, leaves)),
            Variant("SDPA, document by document", lambda: _by_document(kind, leaves)),
            Variant("flex_attention, compiled", lambda: _flex(setting, kind, leaves)),
            Variant("varlen, longest document known", lambda: _varlen(setting, kind, leaves)),
            Variant("varlen, FlashAttention 3", lambda: _varlen(setting, kind, leaves, "FA3")),
            Variant("varlen, FlashAttention 4", lambda: _varlen(setting, kind, leaves, "FA4")),
        ]
    else:
        variants.append(
            Variant("torchtune, scores as a whole", lambda: _whole(setting, kind, leaves))
        )
    if len(kind.rows[0]) == 1:
        variants.insert(1, Variant("SDPA, causal", lambda: causal(leaves)))
    packed = len(kind.rows[0]) > 1
    return Case(
        name=kind.name,
        what=(
            f"{size.batch} x {size.sequence} tokens, {kind.heads} query and {kind.kv_heads} key "
            f"heads of {kind.head_dim}; {sum(map(len, kind.rows))} documents"
            + (f", {documents.WORDS}, seed 1" if packed else "")
            + (f"; scores capped at {kind.cap:g}, window {kind.window}" if kind.cap else "")
        ),
        variants=variants,
        reference=lambda: _reference(setting, kind, query, key, value, upstream),
        tolerance=setting.tolerance,
        upstream=upstream,
        # Two products forward and four backward, of the pairs that attention needs.
        rate=(
            "TFLOP/s",
            12 * kind.heads * kind.head_dim * documents.pairs(kind.rows, kind.window) / 1e12,
        ),
    )


class _Given(nn.Module):
    """A projection that gives a fixed result, so that attention is measured by itself."""

    def __init__(self, result: torch.Tensor, copied: bool) -> None:
        super().__init__()
        self.result, self.copied = result, copied

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.result.clone() if self.copied else self.result


def _layer(kind: Kind, leaves: Tensors) -> nn.Module:
    """torchtune's layer with given projections."""
    options: dict[str, Any] = {
        "embed_dim": kind.heads * kind.head_dim,
        "num_heads": kind.heads,
        "num_kv_heads": kind.kv_heads,
        "head_dim": kind.head_dim,
        # torchtune scales Gemma 2's queries in place.
        "q_proj": _Given(leaves["query"], copied=kind.cap is not None),
        "k_proj": _Given(leaves["key"], copied=False),
        "v_proj": _Given(leaves["value"], copied=False),
        "output_proj": nn.Identity(),
        "max_seq_len": leaves["query"].shape[1],
    }
    if kind.cap is None:
        return MultiHeadAttention(**options)
    return Gemma2Attention(**options, softcapping=kind.cap, sliding_window_size=kind.window)


def _call(layer: nn.Module, leaves: Tensors, mask: Any) -> Callable[[], torch.Tensor]:
    shape = leaves["query"].shape
    # Only its shape is read, as the projections give what they give.
    inputs = leaves["query"].detach()[..., 0, :1]
    return lambda: layer(inputs, inputs, mask=mask).view(shape)


def _trainer(setting: Setting, kind: Kind, leaves: Tensors, blocks: bool = False) -> Ready:
    """The trainer's attention, by the path that it takes here or by blocks."""
    device = setting.device
    gpu = device.type == "cuda"
    figures: dict[str, Any] = {}
    if blocks and gpu and not setting.compiled:
        raise Unavailable("compiling is switched off")
    if blocks and not gpu:
        leaves, figures = _without_gradient(leaves)
    layer = _layer(kind, leaves)
    # Its hooks, which make a batch's blocks before all layers, stand around a whole model.
    model = nn.ModuleList([layer])
    attention.use_documents(model, device, setting.dtype)
    mask: Any = documents.documents(kind.rows, device)[0]
    if blocks or hasattr(layer, "flex_attention"):
        attention.use_blocks(model, device)
        numbers = mask.numbers
        mask, seconds = _timed(setting, lambda: flex.blocks(numbers, {kind.window}))
        figures["making the blocks, ms"] = round(1e3 * seconds, 2)
        path = "flex_attention" if gpu else "flex_attention, not compiled"
    else:
        path = "SDPA with a mask" if layer.varlen_attention is None else "varlen"
    figures["path"] = path
    run = _call(layer, leaves, mask)
    wanted = {name: tensor for name, tensor in leaves.items() if tensor.requires_grad}
    return Ready(run, wanted, figures=lambda: figures)


def _without_gradient(leaves: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """flex_attention on a CPU refuses tensors that want a gradient."""
    return {n: t.detach() for n, t in leaves.items()}, {"note": "no backward pass on CPU"}


def _timed(setting: Setting, make: Callable[[], Any]) -> tuple[Any, float]:
    """What serves all layers of a batch, and how long it takes the second time."""
    make()
    if setting.device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    made = make()
    if setting.device.type == "cuda":
        torch.cuda.synchronize()
    return made, time.perf_counter() - began


def _whole(setting: Setting, kind: Kind, leaves: Tensors) -> Ready:
    mask = documents.documents(kind.rows, setting.device)[0].mask()
    return Ready(_call(_layer(kind, leaves), leaves, mask), leaves)


def _masked(setting: Setting, kind: Kind, leaves: Tensors) -> Ready:
    mask = documents.documents(kind.rows, setting.device)[0].mask().unsqueeze(1)
    query, key, value = (tensor.transpose(1, 2) for tensor in leaves.values())
    return Ready(
        lambda: F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, enable_gqa=True
        ).transpose(1, 2),
        leaves,
    )


def causal(leaves: Tensors) -> Ready:
    """Attention that sees all before it, other documents too; right for one document a row."""
    query, key, value = (tensor.transpose(1, 2) for tensor in leaves.values())
    return Ready(
        lambda: F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        ).transpose(1, 2),
        leaves,
    )


def _by_document(kind: Kind, leaves: Tensors) -> Ready:
    sizes = [length for row in kind.rows for length in row]
    shape = leaves["query"].shape

    def one(*parts: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in parts)
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return output.squeeze(0).transpose(0, 1)

    def run() -> torch.Tensor:
        flat = (tensor.flatten(0, 1).split(sizes) for tensor in leaves.values())
        return torch.cat([one(*parts) for parts in zip(*flat, strict=True)]).view(shape)

    return Ready(run, leaves)


def _flex(setting: Setting, kind: Kind, leaves: Tensors) -> Ready:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    numbers = documents.documents(kind.rows, setting.device)[0].numbers
    batch, sequence = numbers.shape

    def sees(row, head, query, key):
        return (query >= key) & (numbers[row, query] == numbers[row, key])

    mask, seconds = _timed(
        setting,
        lambda: create_block_mask(sees, batch, None, sequence, sequence, device=setting.device),
    )
    kernel = compile_for(setting, flex_attention)
    figures: dict[str, Any] = {}
    if setting.device.type == "cpu":
        leaves, figures = _without_gradient(leaves)
    figures["making the blocks, ms"] = round(1e3 * seconds, 2)
    query, key, value = (tensor.transpose(1, 2) for tensor in leaves.values())
    return Ready(
        lambda: kernel(query, key, value, block_mask=mask, enable_gqa=True).transpose(1, 2),
        {name: tensor for name, tensor in leaves.items() if tensor.requires_grad},
        figures=lambda: figures,
    )


def _varlen(
    setting: Setting, kind: Kind, leaves: Tensors, implementation: str | None = None
) -> Ready:
    layer = _layer(kind, leaves)
    attention.use_documents(layer, setting.device, setting.dtype)
    if layer.varlen_attention is None:
        raise Unavailable("needs half precision and a GPU with flash attention")
    offsets = documents.documents(kind.rows, setting.device)[0].offsets
    longest = max(length for row in kind.rows for length in row)
    shape = leaves["query"].shape

    def run() -> torch.Tensor:
        flat = (tensor.flatten(0, 1) for tensor in leaves.values())
        return layer.varlen_attention(*flat, offsets, longest).view(shape)

    if implementation is None:
        return Ready(run, leaves)
    return Ready(run, leaves, around=_implementation(implementation))


def _implementation(name: str) -> Callable[[], AbstractContextManager[None]]:
    """Put another flash attention under torch's operators; raises where it is not there."""
    try:
        from torch.nn.attention import (
            activate_flash_attention_impl,
            restore_flash_attention_impl,
        )
    except ImportError:
        raise Unavailable("this torch has no choice of flash attention") from None

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
        raise Unavailable(f"torch refuses it here: {error}") from error


def _reference(
    setting: Setting,
    kind: Kind,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    upstream: torch.Tensor,
) -> Tensors:
    """The textbook formula, document by document, so that no mask over documents can be wrong."""
    shape, repeats = query.shape, query.shape[2] // key.shape[2]
    flat = [t.to(setting.exact).flatten(0, 1) for t in (query, key, value, upstream)]
    results: dict[str, list[torch.Tensor]] = {n: [] for n in ("output", "query", "key", "value")}
    begin = 0
    for length in (length for row in kind.rows for length in row):
        q, k, v, up = (t[begin : begin + length] for t in flat)
        q, k, v = leaf(q), leaf(k), leaf(v)
        wide_k, wide_v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, wide_k) / shape[3] ** 0.5
        if kind.cap is not None:
            scores = kind.cap * torch.tanh(scores / kind.cap)
        place = torch.arange(length, device=q.device)
        back = place[:, None] - place
        hidden = (back < 0) | (back >= (kind.window or length))
        shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        output = torch.einsum("hqk,khd->qhd", shares, wide_v)
        gradients = torch.autograd.grad(output, [q, k, v], up)
        for name, part in zip(results, (output.detach(), *gradients), strict=True):
            results[name].append(part)
        begin += length
    return {
        name: torch.cat(parts).view(*shape[:2], *parts[0].shape[1:])
        for name, parts in results.items()
    }
