"""Expert parallelism by DeepEP's kernels, where its package deep_ep 2.1 is installed.

A token goes once to each rank that has any of its experts, and what these make of it comes back as
one sum: fewer bytes than a row for each expert (github.com/deepseek-ai/DeepEP).
"""

from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from trainer.errors import ConfigError
from trainer.layers import experts
from trainer.parallel.expert_parallel import known_way, remember
from trainer.parallel.sharded import local

KEY = "expert_parallel_comm_backend"


def missing(dtype: torch.dtype) -> str | None:
    """What is missing for DeepEP with hidden states of `dtype`; None if nothing is."""
    try:
        import deep_ep
    except Exception as error:  # It compares NCCL's libraries, and looks for CUDA, when imported.
        return f"its package deep_ep cannot be imported ({type(error).__name__}: {error})"
    if not hasattr(deep_ep, "ElasticBuffer"):
        return "its package deep_ep is older than 2.1"
    return None if dtype is torch.bfloat16 else "it sends bf16 only; set dtype=bf16"


class DeepExchange:
    """Takes tokens to the ranks of their experts, and sums the outputs where they came from.

    Args:
        share: what the experts' gradients are multiplied with.
        most: the largest number of tokens of a rank in a pass, the same on all ranks.
    """

    sums = True

    def __init__(self, mesh: DeviceMesh, share: float, most: int) -> None:
        self.share, self._group, self._ranks, self._most = (
            share,
            mesh.get_group(),
            mesh.size(),
            most,
        )
        self._buffer: Any = None

    # How many rows come is known only when they have been counted.
    @torch.compiler.disable
    def __call__(
        self, layer: nn.Module, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """As `experts.forward`, with the experts of all ranks."""
        if len(rows) > self._most:
            raise ConfigError(
                f"{KEY}: deepep has room for {self._most} tokens, and a pass has {len(rows)}: "
                f"raise tokenizer.max_seq_len, or set {KEY}=standard"
            )
        count = self._ranks * local(getattr(layer, experts.MATRICES[0])).shape[0]
        if (handle := known_way(layer)) is None:
            way = {"topk_idx": index.contiguous(), "num_experts": count}
        else:
            way = {"handle": handle}
        x, shares, handle = _Dispatch.apply(rows, weights.float(), self, way)
        remember(layer, handle)
        ends = handle.psum_num_recv_tokens_per_expert
        numbers = ends.diff(prepend=ends.new_zeros(1))
        x = experts.products(layer, x, ends, numbers) * shares.unsqueeze(1)
        return _Combine.apply(x.to(rows.dtype), self, handle)

    def buffer(self, rows: torch.Tensor, active: int) -> Any:
        """DeepEP's buffer, for all layers; made by all ranks in their first pass."""
        if self._buffer is None:
            from deep_ep import ElasticBuffer

            self._buffer = ElasticBuffer(
                self._group,
                num_max_tokens_per_rank=self._most,
                hidden=rows.shape[1],
                num_topk=active,
            )
        return self._buffer


class _Dispatch(Function):
    """Tokens to a row for each of this rank's experts that they chose, sorted by expert."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weights: torch.Tensor,
        exchange: DeepExchange,
        way: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        buffer = exchange.buffer(rows, weights.shape[1])
        x, _, shares, handle, _ = buffer.dispatch(
            rows.contiguous(), topk_weights=weights.contiguous(), do_expand=True, **way
        )
        handle = way.get("handle", handle)
        ctx.buffer, ctx.handle, ctx.factor = buffer, handle, 1 / exchange.share
        return x, shares, handle

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, rows: torch.Tensor, shares: torch.Tensor, _: None
    ) -> tuple[torch.Tensor | None, ...]:
        given = {"handle": ctx.handle, "topk_weights": shares.contiguous()}
        rows, weights, _ = ctx.buffer.combine(rows.contiguous(), **given)
        return rows * ctx.factor, weights * ctx.factor, None, None


class _Combine(Function):
    """The rows of a token, from all ranks, summed on its own."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, exchange: DeepExchange, handle: Any) -> torch.Tensor:
        ctx.exchange, ctx.handle = exchange, handle
        ctx.buffer = exchange.buffer(rows, handle.topk_idx.shape[1])
        out, _, _ = ctx.buffer.combine(rows.contiguous(), handle=handle)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        small = (gradient * ctx.exchange.share).contiguous()
        rows, *_ = ctx.buffer.dispatch(small, handle=ctx.handle, do_expand=True)
        return rows, None, None
