"""fp8: the matrix products of linear layers in 8 bits, with scales computed at each use.

A layer's weight, inputs, outputs, gradients, optimizer state and checkpoints stay what they are
without it. Only while a product is made are its factors 8-bit numbers (e4m3: 4 bits of exponent, 3
of mantissa; e5m2), with a scale that maps the largest magnitude to the format's largest number:
one scale per tensor (tensorwise) or one per row (rowwise, a power of two).

Source: Micikevicius et al. 2022, FP8 Formats for Deep Learning (arXiv 2209.05433); the recipes,
the formats and which sums may be less precise are those of torchao.float8 (its
Float8LinearConfig.from_recipe_name), with which a test compares them. torchao replaces modules;
this is a function of local tensors, so that LoRA's frozen base, tensor parallelism and FSDP need
nothing of their own, and a frozen weight gets no gradient and keeps no input for one.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from runspec.layout import FP8_MULTIPLE, StepFacts
from trainer.sharded import local

# Ada and Hopper are the first that have them.
CAPABILITY = (8, 9)
# Below it a tensor counts as zeros.
SMALLEST = 1e-12
EXPONENT_BITS = 0x7F800000


def formats(architecture: str) -> tuple[torch.dtype, torch.dtype]:
    """Return what a GPU calls e4m3 and e5m2.

    gfx94 (MI300X, MI325X) multiplies only those without infinity and with one zero, whose largest
    numbers are 240 and 57,344 (torchao.float8.config has the same rule).

    Args:
        architecture: `gcnArchName` of an AMD GPU, "" for all others.
    """
    if architecture.startswith("gfx94"):
        return torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
    return torch.float8_e4m3fn, torch.float8_e5m2


def _architecture() -> str:
    on_amd = torch.version.hip and torch.cuda.is_available()
    return torch.cuda.get_device_properties(0).gcnArchName if on_amd else ""


E4M3, E5M2 = formats(_architecture())


def applies(layer: nn.Module) -> bool:
    """Whether a linear layer is wide enough; a gate with one output is no work worth it."""
    return min(layer.weight.shape) >= FP8_MULTIPLE


def faults(layers: dict[nn.Module, bool], ranks: int) -> list[str]:
    """Return one line per size that no GPU multiplies in fp8.

    Args:
        layers: linear layers, and whether tensor parallelism splits their inputs (else their
            outputs).
        ranks: of tensor parallelism.
    """
    shapes = {
        (*reversed(layer.weight.shape), splits_inputs) for layer, splits_inputs in layers.items()
    }
    return StepFacts(tensor_parallel=ranks, linear=shapes, fp8=True).faults()


def missing(recipe: str, device: torch.device) -> str | None:
    """What `device` lacks to multiply by `recipe`; None if it lacks nothing."""
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) < CAPABILITY:
            name = torch.cuda.get_device_name(device)
            return f"{name} has no fp8, H100 and L40S are the oldest that do"
    elif recipe == "rowwise" and torch.__version__ < (2, 12):
        return f"torch {torch.__version__} knows no scales of rows on a CPU, 2.12 is the first"
    return None


def prepare(layer: nn.Module, recipe: str, frozen: bool) -> None:
    """Set how `layer` (on the meta device) multiplies.

    With one scale per tensor, that of a frozen weight never changes: the buffer `fp8_largest`, a
    scalar, holds the largest magnitude, so that no step computes it again. `fill_magnitudes` fills
    it.
    """
    layer.fp8_recipe = recipe
    if frozen and recipe == "tensorwise":
        largest = layer.weight.new_empty((), dtype=torch.float32)
        layer.register_buffer("fp8_largest", largest, persistent=False)


@torch.no_grad()
def fill_magnitudes(model: nn.Module) -> None:
    """Fill every `fp8_largest` with the same on all ranks, which call this together."""
    layers = [layer for layer in model.modules() if hasattr(layer, "fp8_largest")]
    if not layers:
        return
    weights = [local(layer.weight) for layer in layers]
    # A rank may hold no row of a small weight.
    own = [weight.abs().max() if weight.numel() else torch.zeros(()) for weight in weights]
    largest = torch.stack([magnitude.to(layers[0].fp8_largest) for magnitude in own])
    if dist.get_world_size() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    for layer, value in zip(layers, largest, strict=True):
        layer.fp8_largest.copy_(value)


def linear(
    x: torch.Tensor, weight: torch.Tensor, recipe: str, largest: torch.Tensor | None = None
) -> torch.Tensor:
    """F.linear of x [..., in] with a weight [out, in], both bf16 (or fp32), in x's dtype.

    For the gradient of the weight the number of rows of x must be a multiple of 16.

    Args:
        recipe: tensorwise, with gradients in e5m2; or rowwise, with all in e4m3.
        largest: the largest magnitude of the whole weight, if it is known; tensorwise only.
    """
    rows, trained = x.flatten(0, -2), weight.requires_grad
    return _Linear.apply(rows, weight, largest, recipe, trained).unflatten(0, x.shape[:-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        largest: torch.Tensor | None,
        recipe: str,
        trained: bool,
    ) -> torch.Tensor:
        ctx.recipe = recipe
        ctx.save_for_backward(x if trained else None, weight, largest)
        axis = 1 if recipe == "rowwise" else None
        return _product(_cast(x, axis), _cast(weight, axis, largest=largest), fast=True)

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, None, None]:
        x, weight, largest = ctx.saved_tensors
        # The gradient's magnitudes spread more than what one scale and e4m3 can hold.
        rowwise = ctx.recipe == "rowwise"
        kind = E4M3 if rowwise else E5M2
        # One cast serves both products if the scale is the tensor's.
        along, across = (1, 0) if rowwise else (None, None)
        by_row = _cast(gradient, along, kind)
        by_column = _cast(gradient, across, kind) if rowwise else by_row
        for_input = _product(by_row, _transposed(_cast(weight, across, largest=largest)))
        if x is None:
            return for_input, None, None, None, None
        for_weight = _product(_transposed(by_column), _transposed(_cast(x, across)))
        return for_input, for_weight, None, None, None


Scaled = tuple[torch.Tensor, torch.Tensor, torch.dtype]


def _cast(
    tensor: torch.Tensor,
    axis: int | None,
    kind: torch.dtype | None = None,
    largest: torch.Tensor | None = None,
) -> Scaled:
    """Return (8-bit numbers, the inverse of their scale, the dtype before) of [rows, columns].

    Args:
        kind: of the numbers; None is E4M3.
        axis: along which all numbers share a scale; None for one scale of all, a scalar.
        largest: the largest magnitude, if it is known.
    """
    if largest is None:
        magnitudes = tensor.abs()
        largest = magnitudes.amax() if axis is None else magnitudes.amax(axis, keepdim=True)
    kind = kind or E4M3
    limit = torch.finfo(kind).max
    scale = limit / largest.float().clamp_min(SMALLEST)
    if axis is not None:
        # Rounded down to a power of two: without its mantissa.
        scale = (scale.view(torch.int32) & EXPONENT_BITS).view(torch.float32)
    numbers = (tensor.float() * scale).clamp(-limit, limit).to(kind).contiguous()
    return numbers, scale.reciprocal(), tensor.dtype


def _transposed(scaled: Scaled) -> Scaled:
    numbers, scale, dtype = scaled
    return numbers.t().contiguous(), scale.t(), dtype


def _product(left: Scaled, right: Scaled, fast: bool = False) -> torch.Tensor:
    """left @ right.T of [m, k] and [n, k], the layout in which the GPU multiplies, as [m, n].

    Args:
        fast: sum less precisely, as is done for the activations only.
    """
    (a, a_scale, dtype), (b, b_scale, _) = left, right
    by_row = a_scale.ndim > 0
    if fast or not by_row:
        kind = torch.bfloat16 if by_row else dtype
        return _scaled(a, b.t(), a_scale, b_scale.t(), kind, fast).to(dtype)
    # The kernel for scales of rows is slow with precise sums; powers of two lose nothing later.
    one = torch.ones((), device=a.device)
    product = _scaled(a, b.t(), one, one, torch.bfloat16)
    return (product * (a_scale * b_scale.t())).to(dtype)


def _scaled(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    kind: torch.dtype,
    fast: bool = False,
) -> torch.Tensor:
    """(a * a_scale) @ (b * b_scale) in `kind`, of 8-bit numbers that are summed in fp32."""
    if a.device.type == "cpu" and not isinstance(a, FakeTensor):
        # 8-bit numbers are exact in fp32, and torch's own product on a CPU is 18 times slower than
        # one in fp32. A trace counts what a GPU's product takes.
        return ((a.float() @ b.float()) * (a_scale * b_scale)).to(kind)
    scales = {"scale_a": a_scale, "scale_b": b_scale}
    return torch._scaled_mm(a, b, **scales, out_dtype=kind, use_fast_accum=fast)
