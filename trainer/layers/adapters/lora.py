"""LoRA and DoRA as kinds of adapters: on linear layers and on experts."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from runspec import adapters
from trainer.errors import ConfigError
from trainer.layers import experts
from trainer.layers.adapters import lora_experts, lora_peft
from trainer.layers.adapters.base import AdapterKind
from trainer.layers.adapters.lora_linear import LowRankLinear, adapted_layers, row_norms

if TYPE_CHECKING:
    from trainer.models.decoder import Decoder


class LoRA(AdapterKind):
    """LoRA on linear layers and on experts."""

    declared: ClassVar[adapters.Adapter] = adapters.LORA

    @property
    def use_dora(self) -> bool:
        """Whether layers have magnitudes."""
        return "magnitude" in self.declared.parts

    def add(self, model: "Decoder") -> None:
        """To the linear layers of the blocks, or to those that `lora_modules` names."""
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
            model.set_submodule(name, LowRankLinear(base, rank, alpha, dropout, self.use_dora))

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
    ) -> torch.Tensor:
        """A by Kaiming uniform, B by zeros (Hu et al. 2021, arXiv 2106.09685); magnitudes by the
        norms of the base weight's rows."""
        owner, _, last = name.rpartition(".")
        if last == "magnitude":
            return row_norms(model.get_submodule(owner))
        full = torch.zeros(shape, dtype=torch.float32)
        if owner.endswith(".lora_a"):
            bound = 1 / math.sqrt(shape[-1])
            full.uniform_(-bound, bound, generator=generator)
        return full

    @property
    def dropout(self) -> bool:
        """Whether the adapters' inputs are dropped out."""
        return bool(self.settings.get("lora_dropout"))

    def identity(self, model: "Decoder") -> dict[str, Any]:
        """The factors of B A."""
        return {"lora_scaling": sorted({layer.scaling for layer in adapted_layers(model)})}

    to_peft, from_peft = lora_peft.write, lora_peft.read


class DoRA(LoRA):
    """LoRA with a trained magnitude for each row."""

    declared: ClassVar[adapters.Adapter] = adapters.DORA


def built_in(model: "Decoder", settings: Mapping[str, Any]) -> LoRA | None:
    """The kind of the layers that a builder has made; None if there are none.

    Args:
        settings: the model block.
    """
    layers = [m for m in model.modules() if isinstance(m, LowRankLinear)]
    kind = DoRA if any(layer.magnitude is not None for layer in layers) else LoRA
    return kind(settings) if layers else None
