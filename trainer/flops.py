"""Model FLOPs of a model as it is trained, and the peak of its GPU.

`runspec.flops` has the convention and the count.
"""

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import torch
import yaml
from torch import nn

from runspec.flops import Attention, Linear, ModelFlops, Stage, count
from trainer.layers import nf4
from trainer.layers.attention import DocumentAttention
from trainer.models.decoder import Decoder, Role

GPUS = Path(__file__).parents[1] / "configs/gpus.yaml"


def model_flops(model: Decoder) -> ModelFlops:
    """What `model` needs, sharded or not, with the parameters trained that require a gradient."""
    output = model.embedding if model.output_head is None else model.output_head
    return count(
        # The last norm may be the first that is trained.
        [*_stages(model), [_linear(model.final_norm)]],
        _linear(output),
        trained_before=_linear(model.embedding).any_trained,
    )


def _stages(model: Decoder) -> Iterator[Stage]:
    """The linear layers of the blocks and their attention, in the order of the forward pass."""
    rows = set(model.linear_layers(Role.ROW))
    heads = model.sizes()["num_heads"]
    for parent, names in groupby(model.linear_layers(), lambda name: name.rpartition(".")[0]):
        layers = {name: model.get_submodule(name) for name in names}
        yield [_linear(layer) for name, layer in layers.items() if name not in rows]
        for attention in model.get_submodule(parent).children():
            if isinstance(attention, DocumentAttention):
                yield Attention(heads * attention.head_dim)
        yield [_linear(layer) for name, layer in layers.items() if name in rows]


def _linear(module: nn.Module) -> Linear:
    """A linear layer with or without LoRA; a norm has no weights that count."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.ndim < 2:
        return Linear(0, any(parameter.requires_grad for parameter in module.parameters()))
    adapter = 0.0, 0.0
    if hasattr(module, "lora_a"):
        adapter = module.lora_a.weight.numel(), module.lora_b.weight.numel()
    return Linear(nf4.dense_numel(weight), weight.requires_grad, adapter)


def peak_tflops(device: torch.device) -> float | None:
    """The data sheet's dense bf16 TFLOP/s of this GPU; None on a CPU and an unknown GPU.

    Source: configs/gpus.yaml, the first entry whose `match` the driver's name contains.
    """
    if device.type != "cuda" or not GPUS.is_file():
        return None
    return known_tflops(torch.cuda.get_device_name(device))


def known_tflops(name: str) -> float | None:
    """As `peak_tflops`, by the name that the driver gives to a GPU."""
    known = yaml.safe_load(GPUS.read_text(encoding="utf-8")).values()
    found = (each for each in known if re.search(each["match"], name, re.IGNORECASE))
    return next((float(each["bf16_tflops"]) for each in found), None)
