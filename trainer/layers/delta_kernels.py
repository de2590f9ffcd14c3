"""The gated delta rule by flash-linear-attention's kernels, document by document.

The package is optional: bash setup.sh --with fla. Its own entry ends a compiled graph, so that its
two passes are operators here. Between chunks it keeps the states in fp32, and multiplies in the
dtype of the queries.
"""

from importlib.util import find_spec
from typing import Any

import torch

from runspec.shape import DELTA_CHUNK as CHUNK

INSTALLED = find_spec("fla") is not None and find_spec("triton") is not None


def applies(x: torch.Tensor) -> bool:
    """Whether the kernels are there, and take x: they run on GPUs only."""
    return INSTALLED and x.is_cuda


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    bounds: torch.Tensor | None,
) -> torch.Tensor:
    """As `trainer.layers.delta.gated_delta_rule`.

    Args:
        bounds: int32 [documents + 1], where each document begins in the flattened batch, and the
            end of the last one; None if each row is one. The same tensor in every layer: which
            chunks there are is read from it on the host, once.
    """
    # In fp32, and then in the dtype of the kernels' products.
    query, key = (_normalised(x).to(value.dtype) for x in (query, key))
    given = [query, key, value, decay.float(), rate]
    if bounds is not None:
        given = [x.flatten(0, 1).unsqueeze(0) for x in given]
    out, _, _ = _rule(*(x.contiguous() for x in given), bounds)
    return out.view(value.shape)


def _normalised(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


@torch.library.custom_op("slurm_cookbook::delta_rule", mutates_args=())
def _rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    bounds: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(outputs; sums of the decays in each chunk; inverse of each chunk's triangular matrix)."""
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_fwd

    sums, out, inverse, *_ = chunk_gated_delta_rule_fwd(
        q=query,
        k=key,
        v=value,
        g=decay,
        beta=rate,
        scale=query.shape[-1] ** -0.5,
        initial_state=None,
        output_final_state=False,
        cu_seqlens=bounds,
    )
    return out.to(value.dtype), sums, inverse


@_rule.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    bounds: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inverse = key.new_empty(*value.shape[:3], CHUNK)
    return torch.empty_like(value), torch.empty_like(decay), inverse


@torch.library.custom_op("slurm_cookbook::delta_rule_gradients", mutates_args=())
def _gradients(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sums: torch.Tensor,
    rate: torch.Tensor,
    inverse: torch.Tensor,
    bounds: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of queries, keys, values, decays and rates."""
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd

    for_query, for_key, for_value, for_rate, for_decay, *_ = chunk_gated_delta_rule_bwd(
        q=query,
        k=key,
        v=value,
        g=sums,
        beta=rate,
        A=inverse,
        scale=query.shape[-1] ** -0.5,
        initial_state=None,
        do=gradient,
        dht=None,
        cu_seqlens=bounds,
    )
    gradients = (for_query, for_key, for_value, for_decay, for_rate)
    wanted = (query, key, value, sums, rate)
    made: Any = tuple(one.to(other.dtype) for one, other in zip(gradients, wanted, strict=True))
    return made


@_gradients.register_fake
def _(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sums: torch.Tensor,
    rate: torch.Tensor,
    inverse: torch.Tensor,
    bounds: torch.Tensor | None,
) -> Any:
    return tuple(torch.empty_like(x) for x in (query, key, value, sums, rate))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    query, key, value, _, rate, bounds = inputs
    _, sums, inverse = output
    ctx.save_for_backward(query, key, value, sums, rate, inverse, bounds)


def _backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    return *_gradients(gradient.contiguous(), *ctx.saved_tensors), None


_rule.register_autograd(_backward, setup_context=_keep)
