"""transformers' experts and routers: found in any class, and their experts computed by ours."""

import torch
import torch.nn.functional as F
from torch import nn

from trainer.layers import experts
from trainer.layers.patch import patch_forward
from trainer.sharded import local

# What a class has that transformers' own functions compute (integrations/moe.py): a gate beside
# the activation, and no norm behind. A release that lacks one computes all classes so.
TRAITS = {"has_gate": True, "has_post_expert_norm": False}


def _is(module: nn.Module, name: str) -> bool:
    """Whether a module is of a class of that name: other models need not import Llama 4's."""
    return any(kind.__name__ == name for kind in type(module).__mro__)


def prepare(base: nn.Module) -> None:
    """Let the experts of `base` be computed by trainer.layers.experts, in place.

    Experts of another kind stay as they are, and their weights are refused later.
    """
    for module in list(base.modules()):
        if _is(module, "Llama4TextMoe"):
            experts.prepare(module.experts, _llama4_activation, transposed=True)
            patch_forward(module, _llama4_forward)
        elif _is_known(module):
            experts.prepare(module, _activation, transposed=module.is_transposed)


def is_router(module: nn.Module) -> bool:
    """Whether a linear layer is a router, which `_llama4_forward` computes."""
    return _is(module, "Llama4Router")


def is_balanced(router: nn.Module) -> bool:
    """Whether trainer.layers.balance can watch it: no bias of its own balances it instead."""
    return hasattr(router, "top_k") and not router._buffers and not is_router(router)


def _is_known(module: nn.Module) -> bool:
    return (
        hasattr(module, "is_transposed")
        and not _is(module, "Llama4TextExperts")
        and all(getattr(module, name, value) == value for name, value in TRAITS.items())
        and all(isinstance(getattr(module, n, None), nn.Parameter) for n in experts.MATRICES)
    )


def _activation(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer._apply_gate(x)


def _llama4_activation(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return up * layer.act_fn(gate)


def _llama4_forward(layer: nn.Module, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Llama 4 weighs the inputs of its experts, and transformers sends every token to all."""
    hidden = hidden.reshape(-1, layer.hidden_dim)
    # Under tensor parallelism these are this rank's tokens.
    logits = F.linear(hidden, local(layer.router.weight, partial_gradient=True))
    best, index = logits.topk(layer.top_k, dim=1)
    weights = torch.sigmoid(best.float()).to(best.dtype)
    rows = hidden.unsqueeze(1) * weights.unsqueeze(-1)
    out = [
        layer.experts(rows[:, i], index[:, i : i + 1], torch.ones_like(weights[:, i : i + 1]))
        for i in range(layer.top_k)
    ]
    return layer.shared_expert(hidden) + torch.stack(out).sum(0), logits
