"""fp8: the matrix products of trained linear layers in 8 bits, computed by torchao.float8.

A layer's weight, inputs, outputs, gradients, optimizer state and checkpoints stay what they are
without it. Only while a product is made are its factors 8-bit numbers, with scales computed at each
use: one per tensor (tensorwise) or one per row (rowwise).

torchao's converter replaces modules. Here its product is a function of local tensors, so that
tensor parallelism and FSDP need nothing of their own. It computes the gradient of every weight,
frozen or not, and so would gain nothing under an adapter, whose base is frozen.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from runspec.layout import FP8_MULTIPLE

# Ada and Hopper are the first that have them.
CAPABILITY = (8, 9)


def applies(layer: nn.Module) -> bool:
    """Whether a linear layer is wide enough; a gate with one output is no work worth it."""
    return min(layer.weight.shape) >= FP8_MULTIPLE


def missing(device: torch.device) -> str | None:
    """What `device` lacks to multiply in fp8; None if it lacks nothing."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"{name} has no fp8, H100 and L40S are the oldest that do"
    return None


def prepare(layer: nn.Module, recipe: str) -> None:
    """Set how `layer` multiplies: tensorwise, with gradients in e5m2, or rowwise, all in e4m3."""
    layer.fp8_settings = {emulate: _settings(recipe, emulate) for emulate in (False, True)}


@cache
def _settings(recipe: str, emulate: bool) -> tuple[Any, Any]:
    """What torchao's product takes beside its factors: how it multiplies, and how it casts."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    one = nn.Sequential(nn.Linear(FP8_MULTIPLE, FP8_MULTIPLE, bias=False, device="meta"))
    (converted,) = convert_to_float8_training(one, config=config)
    return converted.linear_mm_config, config


def linear(
    x: torch.Tensor, weight: torch.Tensor, settings: dict[bool, tuple[Any, Any]]
) -> torch.Tensor:
    """F.linear of x [..., in] with a weight [out, in], both bf16 (or fp32), in x's dtype.

    For the gradient of the weight the number of rows of x must be a multiple of 16.

    Args:
        settings: by whether the product is emulated, as it is on a CPU.
    """
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    # A trace counts what a GPU's product takes.
    emulated = x.device.type == "cpu" and not isinstance(x, FakeTensor)
    return matmul_with_hp_or_float8_args.apply(x, weight.t(), *settings[emulated])
