"""The part of a rank in a checkpoint, and how torch.distributed.checkpoint writes and reads it.

Imported at the first save or load: torch's package takes longer than a rank's first steps need.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from trainer.errors import Fault, PeerError, StorageError
from trainer.parallel import copies
from trainer.parallel.world import World
from trainer.sharded import local

# LoRA's checkpoints hold the adapter only; the frozen base is read from the model folder again.
TRAINABLE_ONLY = state_dict.StateDictOptions(ignore_frozen_params=True)
FROZEN_ABSENT = state_dict.StateDictOptions(ignore_frozen_params=True, strict=False)
# In the message of torch's writer of archives if a write fails.
_TORCH_WRITER = "inline_container.cc"
# torch tells everyone to pass a process group or a device where we have passed one.
warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")


@contextmanager
def _plain_errors(group: ProcessGroup, remedy: str) -> Iterator[None]:
    """Turn torch's checkpoint error, which is no Exception, into what this rank has to say.

    Every rank of `group` gets the failures of all. Only one that has failed itself raises its own.
    """
    try:
        yield
    except CheckpointException as error:
        rank = dist.get_rank(group)
        plain = {peer: _plain(cause, peer, remedy) for peer, (cause, _) in error.failures.items()}
        if rank in plain:
            raise plain[rank] from error.failures[rank][0]
        raise PeerError({peer: Fault.of(cause) for peer, cause in plain.items()}) from error


def _plain(cause: BaseException, rank: int, remedy: str) -> Exception:
    if isinstance(cause, OSError) and cause.errno:
        return OSError(cause.errno, f"checkpoint on rank {rank}: {cause.strerror}", cause.filename)
    # torch's own writer covers what the system said.
    kind = StorageError if _TORCH_WRITER in str(cause) else RuntimeError
    return kind(f"checkpoint on rank {rank} failed, {remedy}: {cause}")


def content(model: nn.Module, optimizer: Optimizer, rank: int) -> dict[str, Any]:
    """Everything of this rank in a checkpoint: trained weights, moments, random state."""
    return {
        "model": state_dict.get_model_state_dict(model, options=TRAINABLE_ONLY),
        "optimizer": state_dict.get_optimizer_state_dict(model, optimizer, options=TRAINABLE_ONLY),
        "random": {str(rank): _random_state()},
    }


def write(folder: Path, tensors: dict[str, Any], group: ProcessGroup) -> None:
    """Write this rank's shard; all ranks of `group` call this together."""
    writer = dcp.FileSystemWriter(folder, sync_files=True)
    with _plain_errors(group, "look at the disk's space and quota first"):
        dcp.save(tensors, storage_writer=writer, process_group=group)


def restore(
    folder: Path, model: nn.Module, optimizer: Optimizer, world: World, rank: int | None
) -> None:
    """Put a checkpoint of any layout into model and optimizer; all ranks call this together.

    The optimizer keeps its own hyperparameters: the config decides on those, not the checkpoint.

    Args:
        rank: whose random state to restore; None restores none.
    """
    saved = content(model, optimizer, 0 if rank is None else rank)
    read = {"model": saved["model"], "optimizer": {"state": saved["optimizer"]["state"]}}
    _read(folder, read, world, {} if rank is None else {"random": saved["random"]})
    state_dict.set_model_state_dict(model, saved["model"], options=FROZEN_ABSENT)
    state_dict.set_optimizer_state_dict(
        model, optimizer, saved["optimizer"], options=TRAINABLE_ONLY
    )
    if rank is not None:
        _set_random_state(saved["random"][str(rank)])


def restore_weights(folder: Path, model: nn.Module, world: World) -> None:
    """Put the weights of a checkpoint into the model; all ranks call this together."""
    state = {"model": state_dict.get_model_state_dict(model, options=TRAINABLE_ONLY)}
    _read(folder, state, world, {})
    state_dict.set_model_state_dict(model, state["model"], options=FROZEN_ABSENT)


def _read(folder: Path, tensors: dict[str, Any], world: World, own: dict[str, Any]) -> None:
    """Fill nested dicts of tensors in place; all ranks call this together.

    Of ranks with the same part of a tensor one reads it, and sends it to the others.

    Args:
        own: what this rank reads for itself.
    """
    places = dict(_leaves(tensors))
    shared = {place: each for place, each in places.items() if type(local(each)) is torch.Tensor}
    total = max(sum(each.numel() for each in shared.values()), 1)
    world.limit_for(sum(each.nbytes for each in shared.values()))
    turns, before = {}, 0
    for place, each in shared.items():
        turns[place] = copies.turns(each, world, before / total)
        before += each.numel()
    read: dict[str, Any] = {name: {} for name in tensors}
    for place, each in places.items():
        if place not in shared or copies.reads(turns[place]):
            read[place[0]][".".join(place[1:])] = each
    with _plain_errors(world.cpu_group, "it cannot be read"):
        reader = dcp.FileSystemReader(folder)
        dcp.load({**read, **own}, storage_reader=reader, process_group=world.cpu_group)
    for place in places.keys() - shared.keys():
        holder = tensors
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = read[place[0]][".".join(place[1:])]
    for place, each in shared.items():
        copies.send(each, turns[place])
    world.limit(None)


def _leaves(tensors: dict[str, Any], *place: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """What nested dicts hold, by the keys that lead there."""
    for key, value in tensors.items():
        if isinstance(value, dict):
            yield from _leaves(value, *place, key)
        else:
            yield (*place, key), value


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
