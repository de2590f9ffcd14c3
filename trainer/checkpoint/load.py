"""Weights from a model folder to the ranks: each byte is read by one rank of the run."""

import math
from contextlib import ExitStack

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from trainer.checkpoint.weights import (
    Parts,
    Piece,
    Reader,
    SafetensorsSource,
    file_tensors,
    fill,
    hub_pieces,
)
from trainer.layers import nf4
from trainer.model import Decoder
from trainer.parallel import copies
from trainer.parallel.world import World
from trainer.sharded import local, row_of


@torch.no_grad()
def load(module: Decoder, source: SafetensorsSource, world: World) -> None:
    """Fill the base weights of `module`; all ranks call this together, and read each byte once.

    A rank reads its own part of each tensor. Of ranks that have the same part one reads it and
    sends it to the others. One rank reads a tensor whole, for all, where the hub has rows in
    another order than the model, or one tensor for several parameters. At most one such tensor
    is in memory at a time. What is quantised in the model is so here.

    Raises:
        ConfigError, OSError, SafetensorError, PeerError: a file cannot be read, on this or another
            rank.
    """
    elements = {key: math.prod(shape) for key, shape in source.shapes.items()}
    # Most weights have two bytes.
    world.limit_for(2 * sum(elements.values()))
    parts_of, pieces = file_tensors(module), hub_pieces(module)
    readers: dict[str, tuple[torch.Tensor, copies.Turns]] = {}
    shared: list[tuple[str, Reader]] = []

    def read_own() -> None:
        before, total = 0, max(sum(elements.values()), 1)
        for key, read in source.read(opened):
            share, before = before / total, before + elements[key]
            piece, parts = pieces.get(key), parts_of.get(key, [])
            if piece is not None:
                name, parameter = piece.name, piece.parameter
            elif len(parts) == 1 and key not in source.grown:
                name, parameter = parts[0]
            else:
                # A tied model's folder may hold the output too, which is no parameter of its own.
                shared.extend([(key, read)] if parts else [])
                continue
            if name not in readers:
                readers[name] = parameter, copies.turns(parameter, world, share)
            if copies.reads(readers[name][1]):
                _fill_own(parameter, read) if piece is None else _fill_piece(piece, read)

    with ExitStack() as opened:
        world.on_all(read_own)
        world.on_all(lambda: _read_shared(module, shared, parts_of, source, world))
    for reader in readers.values():
        copies.send(*reader)
    world.limit(None)


def _read_shared(
    module: Decoder,
    shared: list[tuple[str, Reader]],
    parts_of: dict[str | None, Parts],
    source: SafetensorsSource,
    world: World,
) -> None:
    """Fill all ranks from tensors that one of them reads whole, the ranks in turn."""
    fault: Exception | None = None
    for number, (key, read) in enumerate(shared):
        parts = parts_of[key]
        dtypes = {torch.float32 if nf4.is_packed(each) else each.dtype for _, each in parts}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        rows = torch.zeros(source.shapes[key], dtype=dtype, device=world.device)
        if number % world.size == world.rank:
            try:
                rows.copy_(read())
            except (OSError, SafetensorError) as error:
                # The others wait for this tensor, and the next ones.
                fault = fault or error
        if world.size > 1:
            dist.broadcast(rows, src=number % world.size)
        split = rows.split([parameter.shape[0] for _, parameter in parts])
        for (_, parameter), own in zip(parts, split, strict=True):
            fill(parameter, own)
    if fault is not None:
        raise fault


def _fill_own(parameter: torch.Tensor, read: Reader) -> None:
    """Read this rank's part of a parameter, and no more."""
    place = nf4.dense_place(parameter)
    _copy(local(parameter), read(place if any(each != slice(None) for each in place) else ()))


def _fill_piece(piece: Piece, read: Reader) -> None:
    """Read what this rank has of a matrix of one expert: all, some rows or columns, or nothing."""
    expert, rows = piece.place
    if (row := row_of(piece.parameter, expert)) is None:
        return
    _, own, columns = nf4.dense_place(piece.parameter)
    begin, end, _ = own.indices(nf4.dense_shape(piece.parameter)[1])
    first, last = max(begin, rows.start), min(end, rows.stop)
    if first < last:
        part = read((slice(first - rows.start, last - rows.start), columns))
        _copy(local(piece.parameter)[row][first - begin : last - begin], part)


def _copy(target: torch.Tensor, part: torch.Tensor) -> None:
    """Into this rank's part of a parameter, quantised if that is."""
    if nf4.is_packed(target):
        part = nf4.quantise(part.to(target.device))
    target.copy_(part)
