"""Tensor parallelism with sequence-parallel norms: the matrices of each layer over the ranks.

Between the blocks every rank has its part of the sequence. A norm gathers the whole sequence,
column-split layers compute their part of the features, and the row-split layer after them sums
the ranks' partial results, of which each rank gets its part of the sequence (Korthikanti et al.
2022, arXiv 2205.05198). Inside a module the arithmetic is on plain local tensors; DTensor describes
the parameters, and does the communication and its gradients.
"""

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from trainer.layers import linear
from trainer.layers.linear import AdaptedLinear
from trainer.layers.patch import patch_forward, replaced
from trainer.model import Decoder, Role
from trainer.sharded import local

SEQUENCE = Shard(1)
# The argument of a block's parts in transformers' models, where it is given by name.
HIDDEN = "hidden_states"
# The placements of a column-split layer's parameters.
COLUMN = dict.fromkeys(("weight", "bias"), Shard(0))


def _embedding(layer: nn.Embedding, tokens: torch.Tensor) -> torch.Tensor:
    """[batch, sequence] to this rank's [batch, sequence / ranks, dim], from its rows."""
    rows = local(layer.weight)
    first = layer.tensor_parallel_mesh.get_local_rank() * rows.shape[0]
    index = tokens - first
    elsewhere = (index < 0) | (index >= rows.shape[0])
    # Its row has no gradient, although the token may be one that begins documents.
    padding = getattr(layer, "padding_idx", None)
    padding = None if padding is None else padding - first
    own = padding if padding is not None and 0 <= padding < rows.shape[0] else None
    index = index.masked_fill(elsewhere, 0)
    embedded = F.embedding(index, rows, own)
    out = _summed(layer, SEQUENCE, embedded.masked_fill(elsewhere.unsqueeze(-1), 0.0))
    scale = getattr(layer, "output_scale", None)
    # As Gemma was trained, the factor is rounded to the model's dtype.
    return out if scale is None else out * torch.tensor(scale, dtype=out.dtype)


def _summed(layer: nn.Module, to: Shard | Replicate, partial_sum: torch.Tensor) -> torch.Tensor:
    """Sum the ranks' tensors; each rank gets its part of the sum, or all of it."""
    mesh = layer.tensor_parallel_mesh
    summed = DTensor.from_local(partial_sum, mesh, [Partial()], run_check=False)
    return summed.redistribute(placements=[to]).to_local()


def _replicated(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A norm or a linear layer on this rank's tokens or heads, which stay this rank's."""
    if isinstance(layer, nn.Linear | AdaptedLinear):
        return _with_bias(layer, linear.product(layer, x))
    (scale,) = layer.parameters()
    scale = _partial(scale).float()
    if getattr(layer, "unit_offset", False):
        scale = 1 + scale
    return F.rms_norm(x.float(), scale.shape, scale, layer.eps).to(x.dtype)


def _partial(parameter: torch.Tensor) -> torch.Tensor:
    """A replicated parameter; each rank has the gradient of its part of the inputs only."""
    return local(parameter, partial_gradient=True)


def _with_bias(layer: nn.Module, out: torch.Tensor) -> torch.Tensor:
    if layer.bias is None:
        return out
    own = linear.own_part(layer)
    adapted = isinstance(layer, AdaptedLinear)
    return out + (layer.added_bias(own) if adapted else own("bias", layer.bias))


def _norm(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Normalise this rank's [batch, sequence / ranks, dim]; return [batch, sequence, dim]."""
    return _whole(norm, _replicated(norm, x))


def _whole(layer: nn.Module, part: torch.Tensor) -> torch.Tensor:
    """The whole sequence of which `part` is this rank's, for column-split layers."""
    own = DTensor.from_local(part, layer.tensor_parallel_mesh, [SEQUENCE], run_check=False)
    # They give back a gradient that is Partial.
    return local(own.redistribute(placements=[Replicate()]), partial_gradient=True)


def _gather(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A module's own forward pass, on the whole sequence instead of this rank's part of it."""
    if args:
        args = (_whole(layer, args[0]), *args[1:])
    else:
        kwargs = kwargs | {HIDDEN: _whole(layer, kwargs[HIDDEN])}
    return replaced(layer, _gather)(layer, *args, **kwargs)


def _split_norm(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """An RMSNorm over the last dimension of x, of which this rank has its part."""
    mesh = norm.tensor_parallel_mesh
    scale, wide = local(norm.weight).float(), x.float()
    if norm.unit_offset:
        scale = 1 + scale
    squares = _summed(norm, Replicate(), wide.square().sum(-1, keepdim=True))
    # Each rank's features give back a part of the gradient.
    shared = DTensor.from_local(squares, mesh, [Replicate()], run_check=False)
    mean = local(shared, partial_gradient=True) / (mesh.size() * x.shape[-1])
    return (wide * torch.rsqrt(mean + norm.eps) * scale).to(x.dtype)


def _column(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """[batch, sequence, in] to this rank's [batch, sequence, out / ranks]."""
    return _with_bias(layer, linear.product(layer, x))


def _fused(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """[batch, sequence, in] to this rank's part of each piece, [batch, sequence, out / ranks].

    The rows of the weight are split in their order, as a checkpoint has them, so that a rank may
    have all of one piece and nothing of another: the ranks exchange their outputs.
    """
    leaving, received = layer.exchanged
    out = _column(layer, x).movedim(-1, 0)
    # By slices: an index would be copied to the GPU in each forward pass, which waits for it.
    parcels = torch.cat([out[part] for parts in leaving for part in parts])
    sent = [sum(part.stop - part.start for part in parts) for parts in leaving]
    group = layer.tensor_parallel_mesh.get_group()
    # Flash attention takes heads whose features are neighbours in memory.
    return all_to_all_single_autograd(parcels, received, sent, group).movedim(0, -1).contiguous()


def _exchanged(
    pieces: tuple[int, ...], ranks: int, rank: int
) -> tuple[list[list[slice]], list[int]]:
    """How one rank exchanges its outputs of a fused layer.

    Returns:
        By rank, the outputs that leave to it, and how many come from it. What comes from the ranks
        is in the order of the pieces.
    """
    width = sum(pieces) // ranks

    def parts(source: int, target: int) -> list[slice]:
        """Of the outputs of one rank, those that another one needs."""
        slices, start, first = [], 0, source * width
        for piece in pieces:
            share = piece // ranks
            low = max(first, start + target * share)
            high = min(first + width, start + (target + 1) * share)
            slices += [slice(low - first, high - first)] if low < high else []
            start += piece
        return slices

    coming = [sum(p.stop - p.start for p in parts(source, rank)) for source in range(ranks)]
    return [parts(rank, target) for target in range(ranks)], coming


def _row(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """This rank's [batch, sequence, in / ranks] to its [batch, sequence / ranks, out]."""
    # LoRA's B is linear: the ranks' outputs of A need no sum of their own before it.
    out = linear.product(layer, x, partial(_summed, layer, Replicate()))
    return _with_bias(layer, _summed(layer, SEQUENCE, out))


def _output(layer: nn.Module, x: torch.Tensor) -> DTensor:
    """[batch, sequence, dim] to logits that stay split over the vocabulary."""
    mesh = layer.tensor_parallel_mesh
    return DTensor.from_local(_column(layer, x), mesh, [Shard(-1)], run_check=False)


def _score(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """[documents, dim], whole on every rank, to the score of each, likewise."""
    mesh, weight = layer.tensor_parallel_mesh, local(layer.weight)
    # Each rank gives back the gradient of its own columns: column-split layers do so, too.
    own = x.narrow(-1, mesh.get_local_rank() * weight.shape[1], weight.shape[1])
    return _summed(layer, Replicate(), F.linear(own.float(), weight.float()))


def _own_forward(layer: nn.Module, *args: torch.Tensor) -> object:
    """A module's own forward pass, on this rank's tokens or heads."""
    return replaced(layer, _own_forward)(_Local(layer), *args)


class _Local:
    """A module as its own forward pass sees it there, with this rank's part of its parameters.

    Not by changing the module for the time: the compiler cannot follow that.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        parameter = self._module._parameters.get(name)
        return getattr(self._module, name) if parameter is None else _partial(parameter)


# By role: the forward pass (module, input) -> output, in which tensors are this rank's and the
# module has its mesh, or None: it stays as it is; and the placements of the parameters that are not
# replicated.
STYLES: dict[Role, tuple[Callable[..., Any] | None, dict[str, Shard]]] = {
    Role.EMBEDDING: (_embedding, {"weight": Shard(0)}),
    Role.OUTPUT: (_output, COLUMN),
    Role.SCORE: (_score, {"weight": Shard(1)}),
    Role.COLUMN: (_column, COLUMN),
    Role.FUSED: (_fused, COLUMN),
    Role.ROW: (_row, {"weight": Shard(1)}),
    Role.NORM: (_norm, {}),
    Role.GATHER: (_gather, {}),
    Role.REPLICATED: (_replicated, {}),
    Role.SPLIT_NORM: (_split_norm, {"weight": Shard(0)}),
    Role.HEADS: (None, dict.fromkeys(("sinks", "A_log", "dt_bias"), Shard(0))),
    Role.WHOLE: (_own_forward, {}),
}
# The sizes of an adapter's parameters along which a linear layer's role splits them.
ALONG = {Role.OUTPUT: "out", Role.COLUMN: "out", Role.FUSED: "out", Role.ROW: "in"}


def split(model: Decoder, mesh: DeviceMesh) -> None:
    """Split `model` in place over the one-dimensional `mesh`.

    Every parameter becomes a DTensor on `mesh`. The model still takes whole sequences, of a
    length that the ranks divide; its logits are DTensors split over the vocabulary.

    Args:
        model: on the meta device, before activation checkpointing; `faults` found none in it.
    """
    model.prepare_split(mesh.size())
    _split_adapter(model, mesh)
    modules = list(model.named_modules())
    for pattern, role in model.roles().items():
        for module in (module for name, module in modules if fnmatchcase(name, pattern)):
            if role is Role.EXPERT:
                _replicate_experts(module, mesh)
            else:
                _split_module(module, mesh, role)


def _split_adapter(model: Decoder, mesh: DeviceMesh) -> None:
    """Split what an adapter adds to blocks and to the model: along the heads' keys and values."""
    parts = {} if model.adapter is None else model.adapter.declared.parts_of("block", "model")
    for owner in model.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if sizes := parts.get(name):
                placement = Shard(sizes.index("kv")) if "kv" in sizes else Replicate()
                _distribute_one(owner, name, parameter, mesh, placement)


def _replicate_experts(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Keep a layer's experts whole, for each rank's own tokens; if no other mesh has them."""
    if layer.exchange is None:
        _distribute(layer, mesh, {})
        layer.partial_gradient = True


def _split_module(module: nn.Module, mesh: DeviceMesh, role: Role) -> None:
    forward, placements = STYLES[role]
    if along := ALONG.get(role):
        parts = getattr(module, "parts", {}).items()
        placements = placements | {n: Shard(s.index(along)) for n, s in parts if along in s}
    module.split_parameters = frozenset(placements)
    _distribute(module, mesh, placements, role not in (Role.GATHER, Role.HEADS))
    module.tensor_parallel_mesh = mesh
    if role is Role.FUSED:
        module.exchanged = _exchanged(module.pieces, mesh.size(), mesh.get_local_rank())
    if forward is not None:
        patch_forward(module, forward)


def _distribute(
    module: nn.Module, mesh: DeviceMesh, placements: dict[str, Shard], with_inner: bool = True
) -> None:
    for name, parameter in list(module.named_parameters(recurse=with_inner)):
        if not isinstance(parameter, DTensor):
            owner, _, last = name.rpartition(".")
            placement = placements.get(name, Replicate())
            _distribute_one(module.get_submodule(owner), last, parameter, mesh, placement)


def _distribute_one(
    owner: nn.Module, name: str, parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement
) -> None:
    # Every rank fills its own part later, so none needs to send it.
    split = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
    setattr(owner, name, nn.Parameter(split, parameter.requires_grad))
