"""Gradients of a sharded model: when they are summed over ranks, their norm, clipping."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trainer.sharded import local

# In which ranks sum gradients, by config.fsdp_reduce_dtype.
REDUCED_IN = {"bf16": torch.bfloat16, "fp32": torch.float32}


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


def average_over_replicas(
    parameters: list[nn.Parameter], mesh: DeviceMesh, dtype: torch.dtype
) -> None:
    """Average gradients over the one-dimensional `mesh`, in `dtype` and in one message.

    It is for models that FSDP does not hold, all of whose ranks have gradients of the same ones.
    """
    own = [local(p.grad) for p in parameters if p.grad is not None]
    flat = torch.empty(sum(g.numel() for g in own), dtype=dtype, device=own[0].device)
    parts = [
        part.view_as(g) for part, g in zip(flat.split([g.numel() for g in own]), own, strict=True)
    ]
    torch._foreach_copy_(parts, own)
    dist.all_reduce(flat, group=mesh.get_group())
    flat /= mesh.size()
    torch._foreach_copy_(own, parts)


def gradient_norm(
    parameters: list[nn.Parameter],
    loss: torch.Tensor | None = None,
    replicas: int = 1,
) -> torch.Tensor:
    """Return the gradient norm over all ranks (a scalar, fp32); nothing waits for the device.

    Args:
        loss: this rank's, detached; if it is not finite on any rank, the norm is not either.
        replicas: how many ranks hold the same, beside those of a gradient's own mesh.
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
    total = torch.stack(squares).sum() / replicas
    if loss is not None:
        total = total + 0 * loss.to(total.device)
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.sqrt()


def excess(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What gradients are divided by to clip them, at least 1: (norm + 1e-6) / max_norm.

    It is the inverse of the factor in torch.nn.utils.clip_grad_norm_.
    """
    return ((norm + 1e-6) / max_norm).clamp(min=1.0)


def clip_gradients(
    parameters: list[nn.Parameter], norm: torch.Tensor, max_norm: float | None
) -> None:
    """Clip gradients with this norm to `max_norm`, in place; None leaves them."""
    if max_norm is not None:
        own = [local(p.grad) for p in parameters if p.grad is not None]
        torch._foreach_div_(own, excess(norm, max_norm))


def _replicas(tensor: torch.Tensor) -> int:
    """Number of ranks that hold the same shard of `tensor`."""
    if not isinstance(tensor, DTensor):
        return 1
    replicated = [i for i, p in enumerate(tensor.placements) if p.is_replicate()]
    return math.prod(tensor.device_mesh.size(i) for i in replicated)
