"""Expert parallelism: each rank has a part of every layer's experts, and tokens travel to them.

The ranks of a group send each token's hidden state to the rank that has its expert and get the
output back, by all-to-all, as in GShard (Lepikhin et al. 2020, arXiv 2006.16668), but no token is
dropped. Ranks that have the same experts shard them further by FSDP.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from runspec.layout import StepFacts
from trainer.layers import experts
from trainer.models.decoder import Decoder
from trainer.parallel.sharded import local


def faults(model: Decoder, ranks: int) -> list[str]:
    """Return why the experts of `model` cannot be spread over `ranks`, one line per fault."""
    if ranks == 1:
        return []
    counts = {getattr(layer, experts.MATRICES[0]).shape[0] for _, layer in experts.layers(model)}
    return StepFacts(expert_parallel=ranks, experts=counts).faults()


def split(model: Decoder, mesh: DeviceMesh, tensor_parallel_dim: int) -> None:
    """Spread the experts of `model` over the one-dimensional `mesh`, in place.

    FSDP divides gradients by the ranks that it sums over. Those of experts have the tokens of all
    ranks of `mesh` already, and FSDP sums over so many fewer: they are divided by the rest here.

    Args:
        model: on the meta device; its experts' parameters are whole, and `faults` found none.
    """
    exchange = Exchange(mesh, tensor_parallel_dim / mesh.size())
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

    # How many rows come from each rank is known only when they have been counted.
    @torch.compiler.disable
    def __call__(
        self, layer: nn.Module, rows: torch.Tensor, chosen: torch.Tensor, active: int
    ) -> torch.Tensor:
        """As `experts.apply`, with the experts of all ranks."""
        order = chosen.argsort(stable=True)
        numbers = torch.arange(len(order), device=order.device)
        back = torch.empty_like(order).scatter_(0, order, numbers)
        own = local(getattr(layer, experts.MATRICES[0])).shape[0]
        leaving = experts.counts(chosen, own * self._ranks)
        coming = torch.empty_like(leaving)
        dist.all_to_all_single(coming, leaving, group=self._group)
        sent, received = self.rows_per_rank(leaving, coming)
        ids = torch.arange(own, device=chosen.device).repeat(self._ranks)
        ids = ids.repeat_interleave(coming, output_size=sum(received))
        x = experts.permuted(rows, order, back, active)
        # The gradient is small between the two, where the experts are, and whole outside.
        x = _AllToAll.apply(x, received, sent, self._group, 1 / self._share)
        x = _AllToAll.apply(experts.apply(layer, x, ids), sent, received, self._group, self._share)
        return experts.permuted(x, back, order)

    def rows_per_rank(self, leaving: torch.Tensor, coming: torch.Tensor) -> list[list[int]]:
        """Rows to each rank and from each, of int64 [experts of all ranks] that say how many go to
        each expert, and come for it; one wait for the device, for both."""
        return torch.stack([leaving, coming]).view(2, self._ranks, -1).sum(2).tolist()


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
