"""How evenly routers spread tokens over experts: measured, and asked for by an auxiliary loss.

With f the share of the tokens that an expert gets, over all ranks, and P its mean probability, the
loss of a layer is E * sum(f * P) over its E experts: the number of active experts if all get the
same, more otherwise (Fedus et al. 2021, Switch Transformers, arXiv 2101.03961, section 2.2;
transformers' load_balancing_loss_func, which takes all layers together).
"""

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import nn

from trainer.layers.experts import counts


class Balance:
    """Watches the routers of a model.

    Args:
        routers: each returns (logits [tokens, experts], weights, index [tokens, active]).
        coefficient: of the auxiliary loss in the loss, which is the mean over layers.
        parts: micro-steps and tensor-parallel ranks, whose gradients are added, not averaged.
    """

    def __init__(self, routers: list[nn.Module], coefficient: float, parts: int) -> None:
        self._routers, self._coefficient = routers, coefficient
        self._factor = coefficient / len(routers) / parts
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        for router in routers:
            router.register_forward_hook(self._watch)

    def metrics(self) -> dict[str, torch.Tensor]:
        """Of the last forward pass, over all ranks, which call this together; scalars.

        expert_load_max: the tokens of the expert that has most, 1 being its fair share; of the
        layer where that is most. expert_load_min: of the one that has fewest. router_entropy: of
        the experts' shares, 1 if all are the same, mean over layers. router_aux_loss: before its
        coefficient, mean over layers, if it has one.
        """
        load = torch.stack([router.load for router in self._routers])
        if self._ranks > 1:
            dist.all_reduce(load)
        shares = load / load.sum(1, keepdim=True)
        count = shares.shape[1]
        # torch would compile special.entr on every rank, at its first call on a GPU.
        entropy = -torch.xlogy(shares, shares).sum(1).mean() / math.log(count)
        values = {
            "expert_load_max": shares.amax() * count,
            "expert_load_min": shares.amin() * count,
            "router_entropy": entropy,
        }
        if self._coefficient:
            loss = torch.stack([router.auxiliary for router in self._routers]).mean()
            if self._ranks > 1:
                dist.all_reduce(loss)
            values["router_aux_loss"] = loss / self._ranks
        return values

    def _watch(self, router: nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> Any:
        logits, weights, index = output
        load = counts(index.flatten(), logits.shape[-1]).float()
        router.load = load.detach()
        if not self._coefficient:
            return output
        everywhere = load
        if self._ranks > 1:
            everywhere = collectives.all_reduce(load, "sum", dist.group.WORLD)
        chosen = everywhere * (index.shape[-1] / everywhere.sum())
        mean = logits.float().softmax(-1).mean(0)
        loss = logits.shape[-1] * (chosen * mean).sum()
        router.auxiliary = loss.detach()
        return logits, _WithLoss.apply(weights, loss, self._factor), index


class _WithLoss(torch.autograd.Function):
    """Its first argument; the second one gets the gradient of a loss times `factor`.

    So the loss of a layer needs no way out of the block, which may be recomputed or compiled.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, loss: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        ctx.save_for_backward(loss)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (loss,) = ctx.saved_tensors
        return gradient, torch.full_like(loss, ctx.factor), None
