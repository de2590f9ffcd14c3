"""Sharded tensors: the part that a rank holds, and the whole of one."""

import logging

import torch
from torch.distributed.tensor import DTensor, Partial

# A parameter that is sharded over two mesh dimensions is gathered in two steps; torch warns of it.
logging.getLogger("torch.distributed.tensor._redistribute").addFilter(
    lambda record: "sequential all_gather" not in record.getMessage()
)


def local(tensor: torch.Tensor, *, partial_gradient: bool = False) -> torch.Tensor:
    """Return this rank's part of a tensor, sharded or not.

    Args:
        partial_gradient: the gradients of a replicated tensor must be summed over the ranks.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    # As a method: the compiler breaks the graph at the function DTensor.to_local.
    return tensor.to_local(grad_placements=[Partial()] if partial_gradient else None)


def local_part(parameter: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Return the part of `full` (the whole tensor, any rank) that this rank has of `parameter`."""
    if not isinstance(parameter, DTensor):
        return full
    mesh = parameter.device_mesh
    # FSDP, the first dimension, has cut what tensor parallelism, the last one, had left.
    for dimension in reversed(range(mesh.ndim)):
        placement = parameter.placements[dimension]
        if not placement.is_replicate():
            parts = full.chunk(mesh.size(dimension), placement.dim)
            index = mesh.get_local_rank(dimension)
            full = parts[index] if index < len(parts) else full.narrow(placement.dim, 0, 0)
    return full


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the unsharded tensor, on every rank; all ranks must call this together."""
    if not isinstance(tensor, DTensor):
        return tensor
    # A parameter that is kept on the CPU is gathered over the network of the GPUs.
    return tensor.to(tensor.device_mesh.device_type).full_tensor()
