"""LoRA of routed experts: an A and a B for each expert, as PEFT's `target_parameters` does."""

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trainer.layers import experts
from trainer.layers.adapters.peft_config import scaling
from trainer.sharded import full_tensor, gathered_row, local, near, row_of

# Whose layout is written; the field of adapter_config.json says so.
PEFT_VERSION = "0.21.2"
# Of these model_types it takes linear layers of these names for experts, as transformers 4 called
# them (transformers_weight_conversion.py), and loads no adapter that has both.
TAKEN_FOR_EXPERTS = ("gate_proj", "up_proj", "down_proj")
CONFUSED = (
    *("deepseek_v2", "deepseek_v3", "ernie4_5_moe", "exaone_moe", "glm4_moe"),
    *("qwen2_moe", "qwen3_moe", "qwen3_next"),
)


class ExpertsLoRA(nn.Module):
    """LoRA of one matrix of all experts: `lora_a` [experts, rank, in], `lora_b` [experts, out,
    rank]."""

    def __init__(self, weight: torch.Tensor, rank: int, transposed: bool) -> None:
        super().__init__()
        count, outputs, inputs = weight.shape
        if transposed:
            outputs, inputs = inputs, outputs
        self.lora_a = _Stack(weight.new_empty(count, rank, inputs))
        self.lora_b = _Stack(weight.new_empty(count, outputs, rank))

    def forward(
        self,
        x: torch.Tensor,
        ends: torch.Tensor,
        part: Callable[[torch.Tensor], torch.Tensor],
        scaling: float,
    ) -> torch.Tensor:
        """What it adds to the product of x, sorted by expert; `ends` is where each one's ends."""
        a, b = part(self.lora_a.weight), part(self.lora_b.weight)
        # A rank that the grouped product does not take is filled up with zeros: the loop over the
        # experts in its place would wait for the host.
        if more := -a.shape[1] % experts.MULTIPLE:
            a, b = F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more))
        inner = experts.grouped(x, a.transpose(1, 2), ends) * scaling
        return experts.grouped(inner, b.transpose(1, 2), ends)

    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole A and B; all ranks call this together."""
        return full_tensor(self.lora_a.weight.detach()), full_tensor(self.lora_b.weight.detach())

    def of(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A [rank, in] and B [out, rank] of one expert; all ranks call this together."""
        return _row(self.lora_a.weight.detach(), expert), _row(self.lora_b.weight.detach(), expert)


def _row(stack: torch.Tensor, index: int) -> torch.Tensor:
    own, row = local(stack), row_of(stack, index)
    part = own.new_empty(own.shape[1:]) if row is None else own[row]
    return gathered_row(stack, near(stack, part), index)


class _Stack(nn.Module):
    """Holds a parameter, so that its name ends as that of a linear layer's adapter."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def add(layer: nn.Module, rank: int, alpha: float, use_rslora: bool = False) -> None:
    """Give both matrices of an expert layer LoRA; on the meta device."""
    layer.rank, layer.use_rslora = rank, use_rslora
    layer.scaling = scaling(rank, alpha, use_rslora)
    for name in experts.MATRICES:
        layer.adapters[name] = ExpertsLoRA(getattr(layer, name), rank, layer.transposed)


def to_peft(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A [experts, rank, in] and B [experts, out, rank] as lora_A and lora_B of PEFT_VERSION.

    lora_A is [experts x rank, in] and lora_B [out, rank x experts] (PEFT's
    ParamWrapper.get_delta_weight).
    """
    return a.flatten(0, 1).contiguous(), b.permute(1, 2, 0).flatten(1).contiguous()


def from_peft(
    a: torch.Tensor, b: torch.Tensor, adapter: ExpertsLoRA, transposed: bool, version: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `to_peft`, of any PEFT's tensors.

    Before 0.19 it took every weight for [experts, in, out]: where it is [experts, out, in], as
    `transposed` says, the two changed places.

    Args:
        version: of the PEFT that wrote them, as in adapter_config.json, if it is known; where both
            sides are as long the shapes do not tell.
    """
    (count, _, inputs), outputs = adapter.lora_a.weight.shape, adapter.lora_b.weight.shape[1]
    a, b = a.unflatten(0, (count, -1)), b.unflatten(1, (-1, count)).permute(2, 0, 1)
    by_its_sides = a.shape[2] == inputs if inputs != outputs else _number(version) >= (0, 19)
    return (a, b) if transposed or by_its_sides else (b.transpose(1, 2), a.transpose(1, 2))


def _number(version: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", str(version or ""))[:2])


def peft_places(name: str) -> dict[str, str]:
    """By matrix, where PEFT keeps the adapter of the experts `name`: one wraps the other."""
    inner, outer = experts.MATRICES
    return {inner: f"{name}.base_layer", outer: name}
