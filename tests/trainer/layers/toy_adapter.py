"""A kind of adapter in one file: a learnt scale for each feature of each block's output."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from runspec.adapters import Adapter
from trainer.layers.patch import patch_forward, replaced
from trainer.model import AdapterKind, Decoder
from trainer.sharded import local


class BlockGain(AdapterKind):
    """Scales begin as `gain_init`, a key of the model block, which is 1 if it is not given."""

    declared: ClassVar[Adapter] = Adapter(
        "BlockGain",
        {"block_gain": ("block", "dim")},
        saved=(("block", "dim"),),
        keys=("gain_init",),
    )

    def add(self, model: Decoder) -> None:
        for block in model.blocks:
            scale = torch.empty(model.embedding.weight.shape[1], dtype=model.embedding.weight.dtype)
            block.block_gain, block.adapter_enabled = nn.Parameter(scale), True
            patch_forward(block, scaled)

    def first_value(
        self, model: Decoder, name: str, shape: torch.Size, generator: torch.Generator
    ) -> torch.Tensor:
        return torch.full(shape, self.settings.get("gain_init", 1.0))

    def identity(self, model: Decoder) -> Mapping[str, Any]:
        return {"scaled_blocks": len(model.blocks)}


def scaled(block: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    out = replaced(block, scaled)(block, *args, **kwargs)
    if not block.adapter_enabled:
        return out
    # Under tensor parallelism a rank has its own part of the sequence.
    return out * local(block.block_gain, partial_gradient=True)
