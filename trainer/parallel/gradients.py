"""Gradients of a sharded model: when they are summed over ranks, their norm, clipping."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trainer.parallel.sharded import local


def set_gradient_sync(model: nn.Module, *, last: bool, each: bool | None) -> None:
    """Say before a backward pass whether it sums gradients over ranks.

    Between micro-steps nothing is sent, and every rank keeps the gradients of a whole replica in
    fp32.

    Args:
        last: this is the last micro-step.
        each: sum within a replica after each micro-step, so that every rank keeps its shard only.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or each)
        model.set_requires_all_reduce(last)


def reduce_partial_gradients(parameters: list[nn.Parameter]) -> None:
    """Sum the gradients that are Partial over tensor-parallel ranks; FSDP has summed its own."""
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def clip_gradients(
    parameters: list[nn.Parameter], max_norm: float | None, loss: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the gradient norm over all ranks (a scalar, fp32); clip to `max_norm` if given.

    The factor is min(1, max_norm / (norm + 1e-6)), as in torch.nn.utils.clip_grad_norm_. Nothing
    in here waits for the device.

    Args:
        loss: this rank's, detached; if it is not finite on any rank, the norm is not either.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    own = [local(gradient) for gradient in gradients]
    # A shard that several ranks hold counts once.
    by_replicas: dict[int, list[torch.Tensor]] = {}
    for gradient, norm in zip(
        gradients, torch._foreach_norm(own, dtype=torch.float32), strict=True
    ):
        by_replicas.setdefault(_replicas(gradient), []).append(norm)
    squares = [torch.stack(norms).square().sum() / n for n, norms in by_replicas.items()]
    total = torch.stack(squares).sum()
    if loss is not None:
        total = total + 0 * loss.to(total.device)
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    norm = total.sqrt()
    if max_norm is not None:
        torch._foreach_mul_(own, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _replicas(tensor: torch.Tensor) -> int:
    """Number of ranks that hold the same shard of `tensor`."""
    if not isinstance(tensor, DTensor):
        return 1
    replicated = [i for i, p in enumerate(tensor.placements) if p.is_replicate()]
    return math.prod(tensor.device_mesh.size(i) for i in replicated)
