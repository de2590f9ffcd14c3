"""Linear layers with LoRA, DoRA, an NF4 base or fp8: which, their forward pass, their merging.

LoRA: W x + s B A x (Hu et al. 2021, arXiv 2106.09685). DoRA: (m / ||W + s B A||) (W x + s B A x)
with the norms of the rows held constant in the backward pass, as section 4.3 of its paper has it
(Liu et al. 2024, arXiv 2402.09353). W may be NF4 in both (QLoRA, QDoRA).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from trainer import forwards, fp8, nf4
from trainer.compat import DoRALinear, LoRALinear, TransformerDecoder
from trainer.parallel import whole

ADAPTED = (LoRALinear, DoRALinear)


def base_layers(model: TransformerDecoder) -> list[str]:
    """Names of the linear layers inside the transformer blocks, adapted or not.

    These are the ones that torchtune's `quantize_base` quantises; embedding and output stay.
    """
    return [
        f"layers.{name}"
        for name, layer in model.layers.named_modules()
        if isinstance(layer, (nn.Linear, *ADAPTED)) and not name.endswith((".lora_a", ".lora_b"))
    ]


def prepare(model: TransformerDecoder, quantised: bool) -> None:
    """Give adapted and quantised layers the forward pass of this module.

    Args:
        model: on the meta device, as a builder without `quantize_base` made it.
        quantised: make the weights of `base_layers` NF4.
    """
    for name in base_layers(model) if quantised else []:
        nf4.pack_weight(model.get_submodule(name))
    for layer in model.modules():
        if isinstance(layer, ADAPTED) or hasattr(layer, "nf4_table"):
            forwards.replace(layer, forward)


def use_fp8(model: TransformerDecoder, recipe: str) -> None:
    """Let `base_layers` multiply in fp8; A and B of an adapter stay as they are.

    Args:
        model: after `prepare`, with no NF4 in it.
        recipe: tensorwise or rowwise.
    """
    frozen = method(model) != "full"
    for name in base_layers(model):
        layer = model.get_submodule(name)
        fp8.prepare(layer, recipe, frozen)
        forwards.replace(layer, forward)


def method(model: nn.Module) -> str:
    """What the model trains: full, LoRA, DoRA, QLoRA or QDoRA."""
    modules = list(model.modules())
    if not any(isinstance(m, ADAPTED) for m in modules):
        return "full"
    quantised = any(hasattr(m, "nf4_table") for m in modules)
    dora = any(isinstance(m, DoRALinear) for m in modules)
    return f"{'Q' if quantised else ''}{'DoRA' if dora else 'LoRA'}"


def rank(layer: nn.Module) -> int:
    """The rank r of an adapted layer."""
    return layer.lora_a.out_features


def scaling(layer: nn.Module) -> float:
    """s = alpha / r of an adapted layer."""
    return layer.scaling if isinstance(layer, DoRALinear) else layer.alpha / layer.rank


def forward(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """[..., in] to [..., out] by a layer whose parameters are whole on this rank."""
    if isinstance(layer, ADAPTED):
        magnitude = getattr(layer, "magnitude", None)
        out = adapted(layer, x, layer.weight, layer.lora_a.weight, layer.lora_b.weight, magnitude)
    else:
        out = base(layer, x, layer.weight)
    return out if layer.bias is None else out + layer.bias


def base(layer: nn.Module, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[..., in] to [..., out] by `weight`, the layer's own or this rank's part; without bias."""
    if hasattr(layer, "nf4_table"):
        return nf4.linear(x, weight, layer.nf4_table)
    if hasattr(layer, "fp8_recipe"):
        return fp8.linear(x, weight, layer.fp8_recipe, getattr(layer, "fp8_largest", None))
    return F.linear(x, weight)


def adapted(
    layer: nn.Module,
    x: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    magnitude: torch.Tensor | None = None,
    total: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """[..., in] to [..., out] by base and adapter, without bias.

    The tensors are the layer's own or this rank's parts of them, of rows or of columns.

    Args:
        magnitude: [out], DoRA's.
        total: sums over the ranks that hold the other columns of the same rows.
    """
    # The factor meets r numbers a token, not all outputs, in the backward pass too.
    inner = F.linear(layer.dropout(x), a) * scaling(layer)
    out = base(layer, x, weight) + F.linear(inner, b)
    if magnitude is None:
        return out
    squares = _squares(layer, weight, a, b)
    return out * (magnitude / _norms(squares if total is None else total(squares), magnitude))


@torch.no_grad()
def _squares(
    layer: nn.Module, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    """Sum of squares of each row of W + s B A, [out] in fp32.

    Multiplied out as ||w||^2 + 2 s b.(W A') + s^2 b (A A') b', so that B A is never made.
    """
    dense = _dense(layer, weight, a.dtype)
    factor, own = scaling(layer), torch.linalg.vector_norm(dense, dim=1, dtype=torch.float32)
    cross = F.linear(dense, a).float()
    a, b = a.float(), b.float()
    return (
        own.square()
        + 2 * factor * (cross * b).sum(1)
        + factor**2 * (F.linear(b, a @ a.T) * b).sum(1)
    )


def _norms(squares: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    # A row of zeros stays one; rounded like the magnitude, the ratio is exactly 1 at first.
    return squares.clamp_min(torch.finfo(torch.float32).tiny).sqrt().to(magnitude.dtype)


def _dense(layer: nn.Module, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if hasattr(layer, "nf4_table"):
        return nf4.dequantise(weight, layer.nf4_table, dtype)
    return weight


def row_norms(rows: torch.Tensor, quantised: bool) -> torch.Tensor:
    """DoRA's first magnitude: the norms [rows] (fp32) of a base weight's rows [rows, in]."""
    if quantised:
        rows = nf4.dequantise(nf4.quantise(rows), nf4.table().to(rows.device), torch.float32)
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)


@torch.no_grad()
def merged(layer: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """The whole weight [out, in] that the layer computes with; all ranks call this together.

    Over an NF4 base this is the dequantised base with the update: the weights that were trained
    and whose loss was measured. The update learned to make up for the rounding of that base,
    and merged into the unquantised weights it would be another, unmeasured model.
    """
    weight = _dense(layer, whole(layer.weight.detach()), dtype)
    if not isinstance(layer, ADAPTED):
        return weight.to(dtype)
    a, b = whole(layer.lora_a.weight.detach()), whole(layer.lora_b.weight.detach())
    result = weight.float() + scaling(layer) * (b.float() @ a.float())
    if isinstance(layer, DoRALinear):
        magnitude = whole(layer.magnitude.detach())
        norms = torch.linalg.vector_norm(result, dim=1).to(magnitude.dtype)
        result *= (magnitude / norms).float()[:, None]
    return result.to(dtype)
