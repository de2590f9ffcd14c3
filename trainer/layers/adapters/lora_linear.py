"""Linear layers with LoRA or DoRA.

LoRA: W x + s B A x (Hu et al. 2021, arXiv 2106.09685). DoRA: (m / ||W + s B A||) (W x + s B A x)
with the norms of the rows held constant in the backward pass, as in section 4.3 of its paper
(Liu et al. 2024, arXiv 2402.09353). With both W may be NF4 (QLoRA, QDoRA).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from runspec import adapters
from trainer.layers import linear, nf4
from trainer.layers.adapters.peft_config import scaling
from trainer.layers.linear import AdaptedLinear, Own
from trainer.sharded import cut_along, full_tensor, total_along


class LowRankLinear(AdaptedLinear):
    """A linear layer with `lora_a`, `lora_b`, and for DoRA `magnitude`.

    Args:
        base: has a weight [out, in] and a bias [out] or None, which become this layer's own.
        rank, alpha: the adapter's; s = alpha / rank.
        dropout: probability, on the adapter's input. Tensor-parallel ranks drop out by themselves:
            each part of the outputs has its own mask of the same inputs.
        use_dora: add the magnitude, [out], which begins as `row_norms`.
        use_rslora: s = alpha / sqrt(rank).
    """

    def __init__(
        self,
        base: nn.Module,
        rank: int,
        alpha: float,
        dropout: float = 0.0,
        use_dora: bool = False,
        use_rslora: bool = False,
    ) -> None:
        parts = (adapters.DORA if use_dora else adapters.LORA).parts_of("linear")
        super().__init__(base, parts)
        weight, like = base.weight, {"device": base.weight.device, "dtype": base.weight.dtype}
        magnitude = nn.Parameter(torch.empty(weight.shape[0], **like)) if use_dora else None
        self.register_parameter("magnitude", magnitude)
        self.rank, self.use_rslora = rank, use_rslora
        self.scaling = scaling(rank, alpha, use_rslora)
        self.dropout = nn.Dropout(dropout) if dropout > 0 else nn.Identity()
        self.lora_a = nn.Linear(weight.shape[1], rank, bias=False, **like)
        self.lora_b = nn.Linear(rank, weight.shape[0], bias=False, **like)
        nn.init.zeros_(self.lora_b.weight)
        self.together: Together | None = None

    def _factors(self, x: torch.Tensor, own: Own) -> tuple[torch.Tensor, torch.Tensor]:
        b = own("lora_b.weight", self.lora_b.weight)
        if self.together is not None:
            return self.together.inner(self, x), b
        # The factor meets r numbers per token, not all outputs, in the backward pass too.
        inner = F.linear(self.dropout(x), own("lora_a.weight", self.lora_a.weight)) * self.scaling
        return inner, b

    def factors(self, x: torch.Tensor, own: Own) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """x and W, the scaled A x and B; for DoRA the rows of W and B have their magnitudes."""
        weight = own("weight", self.weight)
        if not self.adapter_enabled:
            return [(x, weight)]
        pairs = [(x, weight), self._factors(x, own)]
        if self.magnitude is None:
            return pairs
        ratio = self._ratio(weight, own).unsqueeze(1)
        return [(inputs, each * ratio) for inputs, each in pairs]

    def adapted(
        self,
        x: torch.Tensor,
        own: Own,
        total: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """[..., in] to [..., out] by base and adapter, without bias."""
        weight = own("weight", self.weight)
        if not self.adapter_enabled:
            return linear.base(self, x, weight)
        inner, b = self._factors(x, own)
        # Not torch.addmm: compiled, the kernel that uses the sum adds, which moves no more bytes.
        # Up to torch 2.13 addmm first copies the base's outputs on a GPU.
        out = linear.base(self, x, weight) + F.linear(inner, b)
        if self.magnitude is None:
            return out
        return out * self._ratio(weight, own, total)

    def _ratio(
        self,
        weight: torch.Tensor,
        own: Own,
        total: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """What DoRA multiplies each output with, [out]."""
        a, b = own("lora_a.weight", self.lora_a.weight), own("lora_b.weight", self.lora_b.weight)
        squares = self._squares(weight, a, b)
        if total is not None:
            squares = total(squares)
        # A row of zeros stays one; rounded like the magnitude, the ratio is exactly 1 at first.
        magnitude = own("magnitude", self.magnitude)
        norms = squares.clamp_min(torch.finfo(torch.float32).tiny).sqrt().to(magnitude.dtype)
        return magnitude / norms

    @torch.no_grad()
    def _squares(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Sum of squares of each row of W + s B A, [out] in fp32.

        Multiplied out as ||w||^2 + 2 s b.(W A') + s^2 b (A A') b', so that B A is never made.
        """
        dense = linear.dense(self, weight, a.dtype)
        own = torch.linalg.vector_norm(dense, dim=1, dtype=torch.float32)
        cross = F.linear(dense, a).float()
        a, b = a.float(), b.float()
        return (
            own.square()
            + 2 * self.scaling * (cross * b).sum(1)
            + self.scaling**2 * (F.linear(b, a @ a.T) * b).sum(1)
        )

    def merge(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of the weight with the adapter in it, fp32; a bias stays as it is."""
        if name != "weight":
            return tensor
        rows, columns = nf4.dense_place(self.weight)
        a, b = self.whole()
        result = tensor.to(torch.float32, copy=True)
        result.addmm_(b[rows].float(), a[:, columns].float(), alpha=self.scaling)
        if self.magnitude is not None:
            magnitude = full_tensor(self.magnitude.detach())[rows]
            norms = torch.linalg.vector_norm(result, dim=1)
            if cut_along(self.weight, 1):
                norms = total_along(self.weight, 1, norms.square()).sqrt()
            result *= (magnitude / norms.to(magnitude.dtype)).float()[:, None]
        return result

    @torch.no_grad()
    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole A and B; all ranks call this together."""
        return full_tensor(self.lora_a.weight), full_tensor(self.lora_b.weight)

    @property
    def products(self) -> tuple[float, float]:
        """Numbers of A and of B."""
        return self.lora_a.weight.numel(), self.lora_b.weight.numel()


class Together:
    """One product with the A's of several layers, which reads their input once.

    So do the gradients of the A's, and the input's is written once. The first layer that is called
    with a tensor makes the product, and each takes its part; then nothing of it is kept here.
    """

    def __init__(self, layers: list[LowRankLinear]) -> None:
        self.layers = layers
        self.x: torch.Tensor | None = None
        self.parts: dict[int, torch.Tensor] = {}

    def inner(self, layer: LowRankLinear, x: torch.Tensor) -> torch.Tensor:
        """s A x of one of the layers, [..., rank]."""
        place = self.layers.index(layer)
        if self.x is not x or place not in self.parts:
            weights = [
                linear.own_part(each)("lora_a.weight", each.lora_a.weight) for each in self.layers
            ]
            inner = F.linear(x, torch.cat(weights)) * layer.scaling
            self.x = x
            self.parts = dict(enumerate(inner.split([len(a) for a in weights], -1)))
        part = self.parts.pop(place)
        if not self.parts:
            self.x = None
        return part


def share(layers: list[LowRankLinear]) -> None:
    """Let layers without dropout, of the same s, that read the same tensor, read it once."""
    together = Together(layers) if len(layers) > 1 else None
    for layer in layers:
        layer.together = together


def row_norms(layer: nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The norms [out] (fp32) of the rows of a layer's base weight: DoRA's first magnitude."""
    weight = linear.dense(layer, full_tensor(layer.weight.detach()), dtype)
    return torch.linalg.vector_norm(weight.to(dtype), dim=1, dtype=torch.float32)


def adapted_layers(model: nn.Module) -> list[nn.Module]:
    """The layers with an adapter, experts, too; each has `rank`, `scaling`, `use_rslora`."""
    modules = model.modules()
    return [m for m in modules if isinstance(m, LowRankLinear) or len(getattr(m, "adapters", ()))]
