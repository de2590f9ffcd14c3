"""Sharded tensors: the part of a rank, and the whole tensor; parameters that FSDP has gathered."""

import logging
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
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
    return full[place_of(parameter)]


def _cuts(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """(dimension of the mesh, dimension of the tensor) of each cut, in the order of the cuts."""
    if not isinstance(tensor, DTensor):
        return []
    # FSDP, the first dimension, has cut what tensor parallelism, the last one, had left.
    placements = reversed([*enumerate(tensor.placements)])
    return [(number, each.dim) for number, each in placements if not each.is_replicate()]


def place_of(tensor: torch.Tensor) -> tuple[slice, ...]:
    """The place of this rank's part in a tensor: whole[place]; a slice for each dimension."""
    spans = [slice(None)] * tensor.ndim
    for number, dim in _cuts(tensor):
        start, stop, _ = spans[dim].indices(tensor.shape[dim])
        size = -(-(stop - start) // tensor.device_mesh.size(number))
        start = min(start + size * tensor.device_mesh.get_local_rank(number), stop)
        spans[dim] = slice(start, min(start + size, stop))
    return tuple(spans)


def row_of(tensor: torch.Tensor, index: int) -> int | None:
    """The row of this rank's part that holds whole[index], or a part of it; None if none does."""
    start, stop, _ = place_of(tensor)[0].indices(tensor.shape[0])
    return index - start if start <= index < stop else None


def gathered(
    tensor: torch.Tensor, part: torch.Tensor, shape: tuple[int, ...] | None = None
) -> torch.Tensor:
    """The whole of what each rank has a part of, on every rank; all ranks call this together.

    Args:
        tensor: is laid out in the same way.
        part: in any dtype.
        shape: of the whole; that of `tensor` if None.
    """
    if not isinstance(tensor, DTensor):
        return part
    shape = torch.Size(tensor.shape if shape is None else shape)
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(
        part.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride
    ).full_tensor()


def gathered_row(tensor: torch.Tensor, part: torch.Tensor, index: int) -> torch.Tensor:
    """whole[index] of what is laid out as `tensor`, on every rank; all ranks call this together.

    Args:
        part: of whole[index] where `row_of` gives a row; elsewhere memory of the same size, which
            is overwritten.
    """
    cuts, start, stop = _cuts(tensor), 0, tensor.shape[0]
    owners = {}
    for number, dim in cuts:
        if dim == 0:
            size = -(-(stop - start) // tensor.device_mesh.size(number))
            owners[number] = (index - start) // size
            start += size * owners[number]
            stop = min(start + size, stop)
    for number, dim in reversed(cuts):
        group, part = tensor.device_mesh.get_group(number), part.contiguous()
        if dim == 0:
            dist.broadcast(part, group=group, group_src=owners[number])
        else:
            parts = [torch.empty_like(part) for _ in range(tensor.device_mesh.size(number))]
            dist.all_gather(parts, part, group=group)
            part = torch.cat(parts, dim - 1)
    return part


def cut_along(tensor: torch.Tensor, dim: int) -> bool:
    """Whether ranks have different parts of a tensor's dimension."""
    return any(dim == each for _, each in _cuts(tensor))


def total_along(tensor: torch.Tensor, dim: int, values: torch.Tensor) -> torch.Tensor:
    """The sum of `values` over the ranks that cut this dimension of `tensor`; in place."""
    for number, each in _cuts(tensor):
        if each == dim:
            dist.all_reduce(values, group=tensor.device_mesh.get_group(number))
    return values


def near(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """`part` of a tensor's local part, where it is communicated: FSDP may keep it on the CPU."""
    return part.to(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else part


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the unsharded tensor, on every rank; all ranks must call this together."""
    if not isinstance(tensor, DTensor):
        return tensor
    # A parameter that is kept on the CPU is gathered over the network of the GPUs.
    return tensor.to(tensor.device_mesh.device_type).full_tensor()


def reshard(model: nn.Module) -> None:
    """Give up the gathered parameters that a forward pass without a backward pass has left."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
