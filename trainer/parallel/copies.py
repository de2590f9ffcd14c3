"""Ranks that hold the same part of a tensor: one of them reads it, and sends it to the others."""

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from trainer.parallel.world import World
from trainer.sharded import local, near

# The groups of ranks that hold the same part of a tensor, and the rank in each that reads it.
Turns = list[tuple[ProcessGroup, int]]


def turns(tensor: torch.Tensor, world: World, share: float) -> Turns:
    """Who reads this rank's part of a tensor, which is at `share`, 0 to 1, of all that is read.

    Of the ranks with the same part each reads a stretch of the whole, and so few files.
    """
    found, rest = [], share
    for group in _holders(tensor, world):
        turn, rest = divmod(rest * group.size(), 1)
        found.append((group, min(int(turn), group.size() - 1)))
    return found


def _holders(tensor: torch.Tensor, world: World) -> list[ProcessGroup]:
    """The groups of ranks that hold the same part of a tensor as this rank does, by dimension.

    A tensor that is no DTensor is the same on all ranks. A DTensor may be laid out over a part of
    the ranks' mesh: along the dimensions that it does not name, ranks have the same part, too.
    """
    if world.size == 1:
        return []
    if not isinstance(tensor, DTensor):
        return [dist.group.WORLD]
    own = dict(zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=False))
    meshes = (mesh for names, mesh in world.meshes.items() if own.keys() <= {*names})
    mesh = next(meshes, tensor.device_mesh)
    return [
        mesh.get_group(name)
        for name in mesh.mesh_dim_names or ()
        if mesh[name].size() > 1 and (name not in own or own[name].is_replicate())
    ]


def reads(turns: Turns) -> bool:
    """Whether it is this rank that reads."""
    return all(group.rank() == turn for group, turn in turns)


def send(tensor: torch.Tensor, turns: Turns) -> None:
    """Fill this rank's part of a tensor from its reader's; its holders call this together."""
    if not turns or not tensor.numel():
        return
    own = local(tensor)
    part = near(tensor, own).contiguous()
    for number, (group, turn) in enumerate(turns):
        # Those that have it by now are the ones that the reader reaches along earlier dimensions.
        if all(later.rank() == its for later, its in turns[number + 1 :]):
            dist.broadcast(part, group=group, group_src=turn)
    if part is not own:
        own.copy_(part)
