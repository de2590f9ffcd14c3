"""Linear layers with a frozen NF4 weight, forward and backward, and dequantisation alone."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.parts.measure import Case, Runnable, Setting, Tensors, Variant, leaf
from benchmarks.parts.measure import compiled as compile_for
from trainer.layers import linear, nf4

# Rows of the weight that the reference quantises at once.
EXACT_ROWS = 256


def cases(setting: Setting) -> Iterator[Case]:
    """The up projection of the MLP, and the dequantisation of its weight alone."""
    size = setting.size
    weight = setting.random(size.hidden, size.dim, scale=size.dim**-0.5, seed=1)
    # Weights in bf16, as models are published: block scales are then exact in bf16, and all
    # packages choose the same codes.
    weight = weight.bfloat16().to(setting.dtype)
    exact = _nearest(weight.float())
    yield _linear(setting, weight, exact)
    yield _dequantise(setting, weight, exact)


def _linear(setting: Setting, weight: torch.Tensor, exact: torch.Tensor) -> Case:
    size = setting.size
    x = setting.random(size.batch, size.sequence, size.dim, seed=0)
    grad_output = setting.random(size.batch, size.sequence, size.hidden, seed=2)

    def product(dense: torch.Tensor) -> Tensors:
        dense = dense.to(setting.reference_dtype)
        return {
            "output": x.to(setting.reference_dtype) @ dense.t(),
            "x": grad_output.to(setting.reference_dtype) @ dense,
        }

    def variant(make: Callable, compiled: bool = False) -> Callable[[], Runnable]:
        """`make` returns (function of x, its dequantised weight; None if it equals ours)."""

        def prepare() -> Runnable:
            function, dense = make(weight, setting)
            function = compile_for(setting, function) if compiled else function
            inputs = leaf(x)
            reference = None if dense is None else (lambda: product(dense))
            return Runnable(lambda: function(inputs), {"x": inputs}, reference=reference)

        return prepare

    rounded = exact.to(setting.dtype)
    return Case(
        name="linear",
        what=f"{size.tokens} tokens, {size.dim} -> {size.hidden}, blocks of 64, base frozen",
        variants=[
            Variant("trainer", variant(_trainer)),
            Variant("trainer, compiled", variant(_trainer, compiled=True)),
            Variant("torchao NF4", variant(_torchao)),
            Variant("torchao NF4, compiled", variant(_torchao, compiled=True)),
            Variant("bitsandbytes NF4", variant(_bitsandbytes)),
            Variant(
                "not quantised", variant(lambda *_: (lambda rows: F.linear(rows, rounded), None))
            ),
        ],
        reference=lambda: product(exact),
        tolerance=setting.tolerance,
        grad_output=grad_output,
        rate=("TFLOP/s", 2 * 2 * size.tokens * weight.numel() / 1e12),
    )


def _dequantise(setting: Setting, weight: torch.Tensor, exact: torch.Tensor) -> Case:
    packed = nf4.quantise(weight)
    table = nf4.table().to(setting.device)

    def trainer() -> torch.Tensor:
        return nf4.dequantise(packed, table, setting.dtype)

    def torchao() -> Runnable:
        from torchao.dtypes.nf4tensor import to_nf4

        quantised = to_nf4(weight)
        reference = {"output": quantised.get_original_weight().to(setting.reference_dtype)}
        return Runnable(quantised.get_original_weight, reference=lambda: reference)

    def bitsandbytes() -> Runnable:
        from bitsandbytes import functional

        quantised, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
        return Runnable(lambda: functional.dequantize_4bit(quantised, state))

    return Case(
        name="dequantise",
        what=f"a weight of {weight.shape[0]} x {weight.shape[1]}, to {setting.dtype}",
        variants=[
            Variant("trainer", lambda: Runnable(trainer)),
            Variant("trainer, compiled", lambda: Runnable(compile_for(setting, trainer))),
            Variant("torchao NF4", torchao),
            Variant("bitsandbytes NF4", bitsandbytes),
        ],
        reference=lambda: {"output": exact.to(setting.reference_dtype)},
        tolerance=setting.tolerance,
        rate=("G weights/s", weight.numel() / 1e9),
    )


def _trainer(weight: torch.Tensor, setting: Setting) -> tuple[Callable, None]:
    model = nn.ModuleDict({"linear": nn.Linear(*weight.shape[::-1], bias=False, device="meta")})
    linear.quantise(model, ["linear"], "nf4")
    model.to_empty(device=setting.device)
    nf4.fill_tables(model)
    with torch.no_grad():
        model["linear"].weight.copy_(nf4.quantise(weight))
    return model["linear"], None


def _torchao(weight: torch.Tensor, setting: Setting) -> tuple[Callable, torch.Tensor]:
    from torchao.dtypes.nf4tensor import linear_nf4, to_nf4

    quantised = to_nf4(weight)
    # torchao quantises the scales as well, so its weights differ slightly.
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
    """NF4 rounding: the nearest code times the largest magnitude of each block of 64 weights."""
    codes = torch.tensor(nf4.VALUES, device=weight.device)
    parts = []
    for rows in weight.split(EXACT_ROWS):
        blocks = rows.unflatten(1, (-1, nf4.BLOCK))
        scale = blocks.abs().amax(2, keepdim=True).bfloat16().float()
        nearest = (blocks.unsqueeze(-1) / scale.unsqueeze(-1) - codes).abs().argmin(-1)
        parts.append((codes[nearest] * scale).flatten(1))
    return torch.cat(parts)
