"""Attention of a traced step: it computes nothing, and keeps what a GPU's kernels keep."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

from trainer.layers import attention


def attend_as_on_a_gpu(module: torch.nn.Module, dtype: str) -> None:
    """Let attention keep for backward what its kernels on a GPU keep, in bf16."""
    for layer in attention.layers(module):
        # How many documents there are is not known of fake tensors.
        layer.on_cpu = False
    if dtype != "bf16":
        return
    attention.use_flash_attention(module, torch.bfloat16)
    layers = attention.layers(module)
    if any(layer.varlen_attention is None for layer in layers):
        attention.use_flex_attention(module, torch.device("cpu"))
        for layer in layers:
            layer.flex_attention = _in_place_of_flex_attention


def _in_place_of_flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    return_aux: AuxRequest | None = None,
    **_: Any,
) -> torch.Tensor | tuple[torch.Tensor, AuxOutput]:
    """FlexAttention, which runs on GPUs only: [batch, heads, length, width] each."""
    output, sums = _attention(query, key, value)
    return output if return_aux is None else (output, AuxOutput(lse=sums))


def _attention_sizes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, length, _ = query.shape
    # As the model reads it: [batch, length, heads, width].
    output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
    return output, query.new_empty(batch, heads, length, dtype=torch.float32)


def _gradient_sizes(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    sums: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _operator(name: str, sizes: Callable[..., Any]) -> Any:
    """An operator that computes nothing, and whose results have these sizes.

    Compilers do not look into it: one that saw what the gradients' does would find that it needs
    no saved tensor.
    """
    operator = torch.library.custom_op(f"slurm_cookbook::{name}", sizes, mutates_args=())
    operator.register_fake(sizes)
    return operator


# As fused attention it keeps its three inputs, its output and the logarithm of each row's sum.
_attention = _operator("traced_attention", _attention_sizes)
_attention_gradients = _operator("traced_attention_gradients", _gradient_sizes)


def _keep_attention(ctx: Any, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs, *output)


def _attention_backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor, ...]:
    gradients: tuple[torch.Tensor, ...] = _attention_gradients(gradient, *ctx.saved_tensors)
    return gradients


_attention.register_autograd(_attention_backward, setup_context=_keep_attention)
