"""Copies of sharded state in CPU memory, so that training goes on while a checkpoint is written."""

import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

CGROUPS = Path("/sys/fs/cgroup")
# limit, usage, and the reclaimable file cache in memory.stat, by cgroup version.
CGROUP_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
CGROUP_2 = ("memory.max", "memory.current", "inactive_file")


@torch.no_grad()
def stage(state: Any, buffers: Any = None) -> tuple[Any, torch.cuda.Event | None]:
    """A copy of nested dicts and lists of tensors with every byte in CPU memory.

    Sharded tensors stay sharded: of a DTensor, or of any tensor made of others (8-bit optimizer
    states, NF4), the innermost tensors are copied. From a GPU the copies go to pinned memory over
    a stream of their own, beside whatever is computed next.

    Args:
        buffers: the copy that an earlier call returned; its memory is used again if shapes are
            the same.

    Returns:
        The copy, and the event of its being there: before it nothing may read the copy or change
        `state`. None if it is there at once.
    """
    if not torch.cuda.is_initialized():
        return _copied(state, buffers), None
    stream = _stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        return _copied(state, buffers), stream.record_event()


@cache
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _copied(state: Any, buffers: Any) -> Any:
    values, tree = tree_flatten(state)
    old, old_tree = tree_flatten(buffers)
    if old_tree != tree:
        old = [None] * len(values)
    return tree_unflatten(map(_copied_value, values, old), tree)


def _copied_value(value: Any, buffer: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        # Such as a number of the optimizer's settings.
        return copy.deepcopy(value)
    parts = _parts(value)
    if parts is not None:
        names, context = parts
        copies = {name: getattr(value, name) for name in names}
        for name, part in copies.items():
            # What is no tensor here is a device mesh, which all tensors share.
            if isinstance(part, torch.Tensor):
                copies[name] = _copied_value(part, getattr(buffer, name, None))
        return type(value).__tensor_unflatten__(copies, context, value.size(), value.stride())
    alike = type(buffer) is torch.Tensor and buffer.shape == value.shape
    if not alike or buffer.dtype != value.dtype:
        buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
    if value.is_cuda:
        # What is freed meanwhile is used again only when the copy is done.
        value.record_stream(torch.cuda.current_stream())
    return buffer.copy_(value, non_blocking=True)


def _parts(tensor: torch.Tensor) -> tuple[list[str], Any] | None:
    """The attributes that hold a composed tensor's content; None for a plain tensor."""
    return tensor.__tensor_flatten__() if hasattr(tensor, "__tensor_flatten__") else None


def staged_bytes(state: Any) -> int:
    """CPU memory that `stage` takes for `state` on this rank."""
    return sum(_buffer_bytes(tensor) for tensor in _tensors(state))


def _buffer_bytes(tensor: torch.Tensor) -> int:
    size = tensor.nbytes
    # torch's pinned memory comes in powers of two.
    return 1 << (size - 1).bit_length() if tensor.is_cuda and size else size


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    for value in filter(torch.is_tensor, tree_leaves(state)):
        parts = _parts(value)
        if parts is None:
            yield value
        else:
            yield from _tensors([getattr(value, name) for name in parts[0]])


def available_bytes() -> int:
    """Memory that this process may still take: the host's, or its job's cgroup's if that is less.

    Slurm limits a job's memory by a cgroup, and the kernel kills what goes beyond it.
    """
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            host = int(line.split()[1]) * 1024
    return min([host, *_cgroup_rooms()])


def _cgroup_rooms() -> Iterator[int]:
    """What is left under each memory limit between this process's cgroup and the root."""
    for folder, (limit_name, usage_name, cache_name) in _cgroups():
        for level in (folder, *folder.parents):
            try:
                limit = int((level / limit_name).read_text(encoding="ascii"))
                usage = int((level / usage_name).read_text(encoding="ascii"))
                stat = (level / "memory.stat").read_text(encoding="ascii").split()
            except (OSError, ValueError):
                # No limit at this level ("max"), or the level is not there in a container.
                continue
            cache = int(stat[stat.index(cache_name) + 1]) if cache_name in stat else 0
            yield limit - usage + cache


def _cgroups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """The folder of each cgroup that this process is in, and how its three figures are called."""
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield CGROUPS / path.lstrip("/"), CGROUP_2
        elif "memory" in controllers.split(","):
            yield CGROUPS / "memory" / path.lstrip("/"), CGROUP_1
