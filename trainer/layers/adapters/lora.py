"""LoRA and DoRA.

LoRA: W x + s B A x (Hu et al. 2021, arXiv 2106.09685). DoRA: (m / ||W + s B A||) (W x + s B A x)
with the norms of the rows held constant in the backward pass, as in section 4.3 of its paper
(Liu et al. 2024, arXiv 2402.09353). With both W may be NF4 (QLoRA, QDoRA).
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from runspec import adapters
from trainer.errors import ConfigError
from trainer.layers import linear, nf4
from trainer.layers.adapters.base import AdaptedLinear, AdapterKind, Hub, Loaded, Own
from trainer.parallel.sharded import full_tensor

if TYPE_CHECKING:
    from trainer.models.decoder import Decoder


class LoRALinear(AdaptedLinear):
    """A linear layer with `lora_a`, `lora_b`, and for DoRA `magnitude`.

    Args:
        base: has a weight [out, in] and a bias [out] or None, which become this layer's own.
        rank, alpha: the adapter's; s = alpha / rank.
        dropout: probability, on the adapter's input.
        use_dora: add the magnitude, [out], which `storage.weights` fills.
    """

    def __init__(
        self, base: nn.Module, rank: int, alpha: float, dropout: float = 0.0, use_dora: bool = False
    ) -> None:
        super().__init__(base, (adapters.DORA if use_dora else adapters.LORA).parts_of("linear"))
        weight, like = base.weight, {"device": base.weight.device, "dtype": base.weight.dtype}
        magnitude = nn.Parameter(torch.empty(weight.shape[0], **like)) if use_dora else None
        self.register_parameter("magnitude", magnitude)
        # A loaded adapter may have another factor: see peft_config.
        self.rank, self.scaling, self.use_rslora = rank, alpha / rank, False
        self.dropout = nn.Dropout(dropout) if dropout > 0 else nn.Identity()
        self.lora_a = nn.Linear(weight.shape[1], rank, bias=False, **like)
        self.lora_b = nn.Linear(rank, weight.shape[0], bias=False, **like)
        nn.init.zeros_(self.lora_b.weight)

    def _factors(self, x: torch.Tensor, own: Own) -> tuple[torch.Tensor, torch.Tensor]:
        # The factor meets r numbers per token, not all outputs, in the backward pass too.
        inner = F.linear(self.dropout(x), own("lora_a.weight", self.lora_a.weight)) * self.scaling
        return inner, own("lora_b.weight", self.lora_b.weight)

    def factors(self, x: torch.Tensor, own: Own) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """The scaled A x, and B."""
        if not self.adapter_enabled:
            return []
        return [self._factors(x, own)] if self.magnitude is None else None

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
        out = linear.base(self, x, weight) + F.linear(inner, b)
        if self.magnitude is None:
            return out
        squares = self._squares(weight, own("lora_a.weight", self.lora_a.weight), b)
        if total is not None:
            squares = total(squares)
        # A row of zeros stays one; rounded like the magnitude, the ratio is exactly 1 at first.
        magnitude = own("magnitude", self.magnitude)
        norms = squares.clamp_min(torch.finfo(torch.float32).tiny).sqrt().to(magnitude.dtype)
        return out * (magnitude / norms)

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
        """The whole weight with the adapter in it, fp32; a bias stays as it is."""
        if name != "weight":
            return tensor
        a, b = full_tensor(self.lora_a.weight.detach()), full_tensor(self.lora_b.weight.detach())
        result = tensor.float() + self.scaling * (b.float() @ a.float())
        if self.magnitude is not None:
            magnitude = full_tensor(self.magnitude.detach())
            norms = torch.linalg.vector_norm(result, dim=1).to(magnitude.dtype)
            result *= (magnitude / norms).float()[:, None]
        return result

    @property
    def products(self) -> tuple[float, float]:
        """Numbers of A and of B."""
        return self.lora_a.weight.numel(), self.lora_b.weight.numel()


def row_norms(rows: torch.Tensor, quantised: bool = False) -> torch.Tensor:
    """DoRA's first magnitude: the norms [rows] (fp32) of a base weight's rows [rows, in]."""
    if quantised:
        rows = nf4.dequantise(nf4.quantise(rows), nf4.table().to(rows.device), torch.float32)
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)


class LoRA(AdapterKind):
    """LoRA on linear layers and on experts."""

    title: ClassVar[str] = adapters.LORA.title
    parts: ClassVar[Mapping[str, adapters.Sizes]] = adapters.LORA.parts
    saved: ClassVar[tuple[adapters.Sizes, ...]] = adapters.LORA.saved
    keys: ClassVar[tuple[str, ...]] = adapters.LORA.keys
    merges: ClassVar[bool] = True
    peft_type: ClassVar[str] = "LORA"
    use_dora: ClassVar[bool] = False

    def add(self, model: "Decoder") -> None:
        """To the linear layers of the blocks, or to those that `lora_modules` names."""
        from trainer.layers import experts
        from trainer.layers.adapters import lora_experts

        rank = self.settings.get("lora_rank")
        if rank is None:
            raise ConfigError("model.adapter: LoRA and DoRA need model.lora_rank")
        layers = {name: name.rpartition(".")[2] for name in model.linear_layers()}
        routed = [layer for _, layer in experts.layers(model)]
        known = {*layers.values(), *([experts.NAME] if routed else [])}
        wanted = set(self.settings.get("lora_modules") or known)
        if unknown := wanted - known:
            raise ConfigError(
                f"model.lora_modules: no layer {', '.join(sorted(unknown))}; has "
                f"{', '.join(sorted(known))}"
            )
        alpha = self.settings.get("lora_alpha", 2 * rank)
        dropout = self.settings.get("lora_dropout", 0.0)
        if experts.NAME in wanted:
            self._check_experts(dropout, known - {experts.NAME})
            for layer in routed:
                lora_experts.add(layer, rank, alpha)
        for name in [name for name, last in layers.items() if last in wanted]:
            base = model.get_submodule(name)
            model.set_submodule(name, LoRALinear(base, rank, alpha, dropout, self.use_dora))

    def _check_experts(self, dropout: float, others: set[str]) -> None:
        """PEFT has neither for weights of several experts."""
        given = {"use_dora": self.use_dora, "lora_dropout": dropout}
        if wrong := [key for key, value in given.items() if value]:
            raise ConfigError(
                *(
                    f"model.{key}: is not possible for the experts; leave it out, or leave the "
                    f"experts out: model.lora_modules=[{','.join(sorted(others))}]"
                    for key in wrong
                )
            )

    def first_value(
        self, model: "Decoder", name: str, shape: torch.Size, generator: torch.Generator
    ) -> torch.Tensor | None:
        """A by Kaiming uniform, B by zeros (Hu et al. 2021, arXiv 2106.09685)."""
        if name.endswith(".magnitude"):
            return None
        full = torch.zeros(shape, dtype=torch.float32)
        if name.endswith(".lora_a.weight"):
            bound = 1 / math.sqrt(shape[-1])
            full.uniform_(-bound, bound, generator=generator)
        return full

    def from_base(
        self, layer: AdaptedLinear, quantised: bool
    ) -> Mapping[str, Callable[[torch.Tensor], torch.Tensor]]:
        """DoRA's magnitudes are the norms of the base weight's rows at first."""
        return {"magnitude": partial(row_norms, quantised=quantised)} if self.use_dora else {}

    @property
    def dropout(self) -> bool:
        """Whether the adapters' inputs are dropped out."""
        return bool(self.settings.get("lora_dropout"))

    def identity(self, model: "Decoder") -> dict[str, Any]:
        """The factors of B A."""
        return {"lora_scaling": sorted({layer.scaling for layer in adapted_layers(model)})}

    def to_peft(
        self, model: "Decoder", hub: Hub, dtype: torch.dtype
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """See lora_peft.write."""
        from trainer.layers.adapters import lora_peft

        return lora_peft.write(self, model, hub, dtype)

    def from_peft(
        self,
        model: "Decoder",
        hub: Hub,
        tensors: dict[str, torch.Tensor],
        settings: Mapping[str, Any] | None,
        faults: list[str],
    ) -> Loaded:
        """See lora_peft.read."""
        from trainer.layers.adapters import lora_peft

        return lora_peft.read(self, model, hub, tensors, settings, faults)


class DoRA(LoRA):
    """LoRA with a trained magnitude for each row."""

    title: ClassVar[str] = adapters.DORA.title
    parts: ClassVar[Mapping[str, adapters.Sizes]] = adapters.DORA.parts
    saved: ClassVar[tuple[adapters.Sizes, ...]] = adapters.DORA.saved
    use_dora: ClassVar[bool] = True


def adapted_layers(model: nn.Module) -> list[nn.Module]:
    """The layers with an adapter, experts among them; each has `rank`, `scaling`, `use_rslora`."""
    return [
        m for m in model.modules() if isinstance(m, LoRALinear) or len(getattr(m, "adapters", ()))
    ]


def built_in(model: "Decoder", settings: Mapping[str, Any]) -> LoRA | None:
    """The kind of the layers that a builder has made; None if there are none.

    Args:
        settings: the model block.
    """
    layers = [m for m in model.modules() if isinstance(m, LoRALinear)]
    kind = DoRA if any(layer.magnitude is not None for layer in layers) else LoRA
    return kind(settings) if layers else None
