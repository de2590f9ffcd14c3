"""Linear layers over a frozen 4-bit base, forward and backward, and dequantising alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.parts.measure import Case, Ready, Setting, Tensors, Variant, leaf
from benchmarks.parts.measure import compiled as compile_for
from trainer import lora, nf4

# Rows of the weight that the reference quantises at once.
EXACT_ROWS = 256


def cases(setting: Setting) -> Iterator[Case]:
    """A layer of the MLP, and what stands before its product: dequantising the weight."""
    size = setting.size
    weight = setting.random(size.hidden, size.dim, scale=size.dim**-0.5, seed=1)
    # As models come; the scales are then exact in bf16 too, and all packages find the same codes.
    weight = weight.bfloat16().to(setting.dtype)
    exact = _nearest(weight.float())
    yield _linear(setting, weight, exact)
    yield _dequantise(setting, weight, exact)


def _linear(setting: Setting, weight: torch.Tensor, exact: torch.Tensor) -> Case:
    size = setting.size
    x = setting.random(size.batch, size.sequence, size.dim, seed=0)
    upstream = setting.random(size.batch, size.sequence, size.hidden, seed=2)

    def product(dense: torch.Tensor) -> Tensors:
        dense = dense.to(setting.exact)
        return {
            "output": x.to(setting.exact) @ dense.t(),
            "x": upstream.to(setting.exact) @ dense,
        }

    def over(make: Callable, compiled: bool = False) -> Callable[[], Ready]:
        """`make` gives (function of x, the weight that it stands for; None for ours)."""

        def prepare() -> Ready:
            function, dense = make(weight, setting)
            function = compile_for(setting, function) if compiled else function
            inputs = leaf(x)
            own = None if dense is None else (lambda: product(dense))
            return Ready(lambda: function(inputs), {"x": inputs}, reference=own)

        return prepare

    rounded = exact.to(setting.dtype)
    return Case(
        name="linear",
        what=f"{size.tokens} tokens, {size.dim} -> {size.hidden}, blocks of 64, base frozen",
        variants=[
            Variant("trainer", over(_trainer)),
            Variant("trainer, compiled", over(_trainer, compiled=True)),
            Variant("torchao NF4", over(_torchao)),
            Variant("torchao NF4, compiled", over(_torchao, compiled=True)),
            Variant("bitsandbytes NF4", over(_bitsandbytes)),
            Variant("not quantised", over(lambda *_: (lambda rows: F.linear(rows, rounded), None))),
        ],
        reference=lambda: product(exact),
        tolerance=setting.tolerance,
        upstream=upstream,
        rate=("TFLOP/s", 2 * 2 * size.tokens * weight.numel() / 1e12),
    )


def _dequantise(setting: Setting, weight: torch.Tensor, exact: torch.Tensor) -> Case:
    packed = nf4.quantise(weight)
    table = nf4.table().to(setting.device)

    def own() -> torch.Tensor:
        return nf4.dequantise(packed, table, setting.dtype)

    def torchao() -> Ready:
        from torchao.dtypes.nf4tensor import to_nf4

        quantised = to_nf4(weight)
        reference = {"output": quantised.get_original_weight().to(setting.exact)}
        return Ready(quantised.get_original_weight, reference=lambda: reference)

    def bitsandbytes() -> Ready:
        from bitsandbytes import functional

        quantised, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
        return Ready(lambda: functional.dequantize_4bit(quantised, state))

    return Case(
        name="dequantise",
        what=f"a weight of {weight.shape[0]} x {weight.shape[1]}, to {setting.dtype}",
        variants=[
            Variant("trainer", lambda: Ready(own)),
            Variant("trainer, compiled", lambda: Ready(compile_for(setting, own))),
            Variant("torchao NF4", torchao),
            Variant("bitsandbytes NF4", bitsandbytes),
        ],
        reference=lambda: {"output": exact.to(setting.exact)},
        tolerance=setting.tolerance,
        rate=("G weights/s", weight.numel() / 1e9),
    )


def _trainer(weight: torch.Tensor, setting: Setting) -> tuple[Callable, None]:
    holder = nn.Module()
    block = nn.ModuleDict({"linear": nn.Linear(*weight.shape[::-1], bias=False, device="meta")})
    holder.layers = nn.ModuleList([block])
    lora.prepare(holder, quantised=True)
    holder.to_empty(device=setting.device)
    nf4.fill_tables(holder)
    with torch.no_grad():
        block["linear"].weight.copy_(nf4.quantise(weight))
    return block["linear"], None


def _torchao(weight: torch.Tensor, setting: Setting) -> tuple[Callable, torch.Tensor]:
    from torchao.dtypes.nf4tensor import linear_nf4, to_nf4

    quantised = to_nf4(weight)
    # Its scales are quantised once more, so that it stands for other weights.
    return lambda x: linear_nf4(x, quantised), quantised.get_original_weight()


def _bitsandbytes(weight: torch.Tensor, setting: Setting) -> tuple[Callable, None]:
    import bitsandbytes

    layer = bitsandbytes.nn.Linear4bit(
        *weight.shape[::-1],
        bias=False,
        compute_dtype=setting.dtype,
        compress_statistics=False,
        quant_type="nf4",
    )
    layer.weight = bitsandbytes.nn.Params4bit(
        weight.cpu(),
        requires_grad=False,
        compress_statistics=False,
        quant_type="nf4",
        module=layer,
    )
    return layer.to(setting.device), None


def _nearest(weight: torch.Tensor) -> torch.Tensor:
    """Each number as the nearest code of its block of 64, times the block's largest magnitude."""
    codes = torch.tensor(nf4.VALUES, device=weight.device)
    parts = []
    for rows in weight.split(EXACT_ROWS):
        blocks = rows.unflatten(1, (-1, nf4.BLOCK))
        scale = blocks.abs().amax(2, keepdim=True).bfloat16().float()
        nearest = (blocks.unsqueeze(-1) / scale.unsqueeze(-1) - codes).abs().argmin(-1)
        parts.append((codes[nearest] * scale).flatten(1))
    return torch.cat(parts)
