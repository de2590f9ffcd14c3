"""Expert parallelism: each rank has a part of every layer's experts, and tokens travel to them.

The ranks of a group send each token's hidden state to the rank that has its expert and get the
output back, by all-to-all, as in GShard (Lepikhin et al. 2020, arXiv 2006.16668), but no token is
dropped. Ranks that have the same experts shard them further by FSDP.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from trainer.layers import experts
from trainer.model import Decoder
from trainer.sharded import local


def split(model: Decoder, mesh: DeviceMesh, tensor_parallel: int) -> None:
    """Spread the experts of `model` over the one-dimensional `mesh`, in place.

    FSDP divides gradients by the ranks that it sums over. An expert's gradients already have the
    tokens of all ranks of `mesh`, and FSDP sums over fewer ranks: the rest is divided here.

    Args:
        model: on the meta device; its experts' parameters are whole, and `faults` found none.
        tensor_parallel: ranks that compute the same tokens together.
    """
    exchange = Exchange(mesh, tensor_parallel / mesh.size())
    for _, layer in experts.layers(model):
        for name, parameter in list(layer.named_parameters()):
            part = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
            owner, _, last = name.rpartition(".")
            setattr(layer.get_submodule(owner), last, nn.Parameter(part, parameter.requires_grad))
        layer.exchange, layer.partial_gradient = exchange, False


class Exchange:
    """Takes rows to the ranks of their experts, and the outputs back.

    Args:
        share: what the experts' gradients are multiplied with.
    """

    def __init__(self, mesh: DeviceMesh, share: float) -> None:
        self._group, self._ranks, self._share = mesh.get_group(), mesh.size(), share
        on_gpu = mesh.device_type != "cpu"
        # Written by a copy that the device comes to when it has counted; read before the next one.
        self._arrived = torch.empty(2, self._ranks, dtype=torch.int64, pin_memory=on_gpu)

    # How many rows come from each rank is known only when they have been counted.
    @torch.compiler.disable
    def __call__(
        self, layer: nn.Module, rows: torch.Tensor, chosen: torch.Tensor, active: int
    ) -> torch.Tensor:
        """As `experts.apply`, with the experts of all ranks."""
        own = local(getattr(layer, experts.MATRICES[0])).shape[0]
        ways = _ways.get()
        way = None if ways is None else ways.get(layer)
        if way is None:
            leaving = experts.counts(chosen, own * self._ranks)
            coming = torch.empty_like(leaving)
            dist.all_to_all_single(coming, leaving, group=self._group)
            known = self.counted(leaving, coming)
            order = chosen.argsort(stable=True)
        else:
            order, coming, sent, received = way
        back = experts.inverse(order)
        x = experts.permuted(rows, order, back, active)
        if way is None:
            # The host waits for the counts alone: the device has the rows to sort meanwhile.
            sent, received = self.rows_per_rank(known)
            if ways is not None:
                ways[layer] = Way(order, coming, sent, received)
        by_rank = coming.view(self._ranks, own)
        # The gradient is small between the two, where the experts are, and whole outside.
        x = _AllToAll.apply(x, received, sent, self._group, 1 / self._share)
        places = by_expert(by_rank, sum(received))
        x = experts.compute(layer, x, places, by_rank.sum(0))
        x = _AllToAll.apply(x, sent, received, self._group, self._share)
        return experts.permuted(x, back, order)

    def counted(
        self, leaving: torch.Tensor, coming: torch.Tensor
    ) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Begin to copy rows to each rank and from each to the host; with what tells when it is
        done."""
        sums = torch.stack([leaving, coming]).view(2, self._ranks, -1).sum(2)
        self._arrived.copy_(sums, non_blocking=True)
        return self._arrived, torch.cuda.current_stream().record_event() if sums.is_cuda else None

    def rows_per_rank(self, known: tuple[torch.Tensor, torch.cuda.Event | None]) -> list[list[int]]:
        """Rows to each rank and from each; the one wait for the device, for both."""
        numbers, event = known
        if event is not None:
            event.synchronize()
        return numbers.tolist()


def by_expert(coming: torch.Tensor, rows: int) -> torch.Tensor:
    """The order that sorts rows by expert, int64 [rows], of rows that lie by rank and by expert.

    Args:
        coming: int64 [ranks, experts], how many come from each rank for each expert.
        rows: their sum.
    """
    begins = (coming.flatten().cumsum(0) - coming.flatten()).view_as(coming).T.flatten()
    numbers = coming.T.flatten()
    shift = begins - (numbers.cumsum(0) - numbers)
    here = torch.arange(rows, device=coming.device)
    return here + shift.repeat_interleave(numbers, output_size=rows)


class Way(NamedTuple):
    """Where the rows of a layer's tokens went: their order by expert, and how many go and come."""

    order: torch.Tensor
    coming: torch.Tensor
    sent: list[int]
    received: list[int]


# By layer, in a block that may be computed again: empty until its first pass has come there.
_ways: ContextVar[dict[nn.Module, Way] | None] = ContextVar("ways", default=None)


def remembered() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of a checkpoint's first pass and of the one that computes it again.

    Rows go the same way again, so nothing is counted, exchanged and waited for a second time.
    """
    ways: dict[nn.Module, Way] = {}
    return _with(ways), _with(ways)


@contextmanager
def _with(ways: dict[nn.Module, Way]) -> Iterator[None]:
    token = _ways.set(ways)
    try:
        yield
    finally:
        _ways.reset(token)


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks: `sent` of them to each, `received` from each, in the ranks' order.

    The gradient goes the way back, times `factor`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        received: list[int],
        sent: list[int],
        group: Any,
        factor: float,
    ) -> torch.Tensor:
        ctx.sizes, ctx.factor = (sent, received, group), factor
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        back = _AllToAll.apply(gradient * ctx.factor, *ctx.sizes, 1.0)
        return back, None, None, None, None
