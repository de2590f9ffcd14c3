"""Linear layers whose base weight is in bf16, fp32, NF4 or fp8, with an adapter or not."""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn

from trainer.layers import fp8, nf4
from trainer.layers.adapters.base import AdaptedLinear, Own
from trainer.layers.patch import patch_forward
from trainer.parallel.sharded import gathered, local, near


def quantise(model: nn.Module, names: Iterable[str], form: str) -> None:
    """Make the weights of the linear layers `names` NF4 or fp8; on the meta device."""
    for name in names:
        nf4.pack_weight(model.get_submodule(name), form=form)
        _use_base_forward(model.get_submodule(name))


def use_fp8(model: nn.Module, names: Iterable[str], recipe: str, frozen: bool) -> None:
    """Let the linear layers `names` multiply in fp8; parameters of an adapter stay as they are.

    Layers that are too narrow stay as they are, too.

    Args:
        recipe: tensorwise or rowwise.
        frozen: their weights are not trained.
    """
    for layer in filter(fp8.applies, map(model.get_submodule, names)):
        fp8.prepare(layer, recipe, frozen)
        _use_base_forward(layer)


def _use_base_forward(layer: nn.Module) -> None:
    if not isinstance(layer, AdaptedLinear):
        patch_forward(layer, _base_forward)


def _base_forward(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = base(layer, x, layer.weight)
    return out if layer.bias is None else out + layer.bias


def base(layer: nn.Module, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[..., in] to [..., out] by `weight`, the layer's own or this rank's part; without bias."""
    if hasattr(layer, "nf4_table"):
        return nf4.linear(x, weight, layer.nf4_table)
    if hasattr(layer, "fp8_recipe"):
        return fp8.linear(x, weight, layer.fp8_recipe, getattr(layer, "fp8_largest", None))
    return F.linear(x, weight)


def product(
    layer: nn.Module,
    x: torch.Tensor,
    total: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """[..., in] to [..., out] by this rank's part of a linear layer, without its bias.

    Args:
        total: as in `AdaptedLinear.adapted`.
    """
    own = own_part(layer)
    if isinstance(layer, AdaptedLinear):
        return layer.adapted(x, own, total)
    return base(layer, x, own("weight", layer.weight))


def own_part(layer: nn.Module | None) -> Own:
    """How this rank takes its part of a linear layer's parameters under tensor parallelism.

    Of those that are not split, each rank has the gradient of its part of the inputs only.
    """
    split = getattr(layer, "split_parameters", ())
    return lambda name, parameter: local(parameter, partial_gradient=name not in split)


def dense(layer: nn.Module, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A base weight; a quantised one becomes `dtype`."""
    if hasattr(layer, "nf4_table"):
        return nf4.dequantise(weight, layer.nf4_table, dtype)
    return weight


@torch.no_grad()
def merged(layer: nn.Module, name: str, dtype: torch.dtype) -> torch.Tensor:
    """The whole weight [out, in] or bias [out] that the layer computes with; all ranks together.

    Each rank merges its own part, and the result is gathered in `dtype`.

    Over a quantised base this is the dequantised base with the update: the weights that were
    trained and whose loss was measured. The update learned to make up for the rounding of that
    base, and merged into the unquantised weights it would be another, unmeasured model.
    """
    parameter = layer.get_parameter(name).detach()
    part = near(parameter, local(parameter))
    if name == "weight":
        part = dense(layer, part, dtype)
    if isinstance(layer, AdaptedLinear):
        part = layer.merge(name, part)
    return gathered(parameter, part.to(dtype), nf4.dense_shape(parameter))
