"""The optimizer and its schedule: any component by name, the fastest form of it where allowed."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainer.config import instantiate
from trainer.errors import ConfigError

# Those of torch that have a fused form on the CPU and on the GPU. It takes sharded parameters too.
FUSED = ("torch.optim.Adam", "torch.optim.AdamW", "torch.optim.SGD")


def build(block: dict[str, Any], parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that a config's `optimizer` block names.

    torch's Adam, AdamW and SGD are fused unless the block gives `fused` or `foreach`.

    Raises:
        ConfigError: it does not exist, or cannot work on parameters that are laid out like these.
    """
    name = str(block.get("_component_"))
    if name in FUSED and not block.keys() & {"fused", "foreach"}:
        block = block | {"fused": True}
    if name.startswith("bitsandbytes."):
        _refuse_bitsandbytes(name, parameters)
    optimizer = instantiate("optimizer", block, parameters)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("optimizer: LBFGS evaluates the loss several times a step; use AdamW")
    return optimizer


def _refuse_bitsandbytes(name: str, parameters: list[torch.nn.Parameter]) -> None:
    eight_bit = f"torchao.optim.{'AdamW' if 'AdamW' in name else 'Adam'}8bit"
    if any(isinstance(p, DTensor) for p in parameters):
        raise ConfigError(
            f"optimizer: {name} cannot update sharded parameters; it works in a single process "
            f"without fsdp_cpu_offload and master_weights; use {eight_bit}"
        )
    if not parameters[0].is_cuda:
        raise ConfigError(f"optimizer: {name} needs a GPU; use {eight_bit}")


def schedule(
    block: dict[str, Any] | None, optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """The learning rate's schedule over `steps` optimizer steps; None where none is named."""
    if block is None:
        return None
    scheduler = instantiate("lr_scheduler", block, optimizer, num_training_steps=steps)
    # torchao's optimizers keep the rate in a tensor, which a checkpoint's JSON cannot hold.
    scheduler.base_lrs = [float(rate) for rate in scheduler.base_lrs]
    return scheduler
