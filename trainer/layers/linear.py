"""Linear layers whose base weight is in bf16, fp32 or NF4, with an adapter or not."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import nn

from runspec.adapters import Sizes
from trainer.errors import ConfigError
from trainer.layers import fp8, nf4
from trainer.layers.patch import patch_forward
from trainer.sharded import gathered, local, near

# (name in the layer, parameter) -> what this rank computes with.
Own = Callable[[str, torch.Tensor], torch.Tensor]


class AdaptedLinear(nn.Module, ABC):
    """A linear layer with an adapter.

    It has the base's weight [out, in] and bias [out] or None; `parts` has the sizes of its other
    parameters by name, as runspec.adapters says them.
    """

    parts: Mapping[str, Sizes]

    def __init__(self, base: nn.Module, parts: Mapping[str, Sizes]) -> None:
        super().__init__()
        self.parts, self.adapter_enabled = parts, True
        self.register_parameter("weight", base.weight)
        self.register_parameter("bias", base.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]; the parameters are whole on this rank."""
        out = self.adapted(x, _whole)
        return out if self.bias is None else out + self.added_bias(_whole)

    @abstractmethod
    def adapted(
        self,
        x: torch.Tensor,
        own: Own,
        total: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """[..., in] to [..., out] by base and adapter, without bias.

        Args:
            own: how this rank's part of a parameter is taken.
            total: sums over the ranks that hold the other columns of the same rows.
        """

    def added_bias(self, own: Own) -> torch.Tensor:
        """What it adds to its product, if it has a bias."""
        return own("bias", self.bias)

    def factors(self, x: torch.Tensor, own: Own) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs whose sum of input @ weight.T is the product, without bias.

        A loss asks this of the output head, which makes no logits as a whole.
        """
        raise ConfigError(f"model: no loss knows an output head of kind {type(self).__name__}")

    def merge(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of `weight` or `bias`, [out, in] or [out], with the adapter in it.

        All ranks call this together. `trainer.layers.nf4.dense_place` of the parameter says which
        rows and columns the part has.
        """
        return tensor

    @property
    def products(self) -> tuple[float, float]:
        """Numbers of the adapter that a token's input, and their result, are multiplied with."""
        return 0.0, 0.0


def _whole(name: str, parameter: torch.Tensor) -> torch.Tensor:
    return parameter


def quantise(model: nn.Module, names: Iterable[str]) -> None:
    """Make the weights of the linear layers `names` NF4; on the meta device."""
    for name in names:
        nf4.pack_weight(model.get_submodule(name))
        _use_base_forward(model.get_submodule(name))


def use_fp8(model: nn.Module, names: Iterable[str], recipe: str) -> None:
    """Let the linear layers `names` multiply in fp8; layers that are too narrow stay as they are.

    Args:
        recipe: tensorwise or rowwise.
    """
    for layer in filter(fp8.applies, map(model.get_submodule, names)):
        fp8.prepare(layer, recipe)
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
    if hasattr(layer, "fp8_settings"):
        return fp8.linear(x, weight, layer.fp8_settings)
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
