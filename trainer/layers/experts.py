"""Routed experts: the tokens of each through grouped matrix products, with adapters and NF4.

All experts of a layer are one tensor per matrix, [experts, out, in] or, transposed, [experts, in,
out]. Tokens are sorted by expert, so that one product per matrix serves them all and no token is
dropped.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trainer.layers import nf4
from trainer.layers.patch import patch_forward
from trainer.sharded import gathered_row, local, near, row_of

# The two matrices; a bias has the name of its matrix and this end.
MATRICES, BIAS = ("gate_up_proj", "down_proj"), "_bias"
# What model.lora_modules calls both.
NAME = "experts"
# The native kernel wants rows of whole 16 bytes.
MULTIPLE = 8


def prepare(layer: nn.Module, activation: Callable[..., torch.Tensor], transposed: bool) -> None:
    """Let `layer` compute its experts here, in place.

    Args:
        layer: has the parameters of `MATRICES`, and perhaps their biases [experts, out].
        activation: (layer, output of the first matrix) -> input of the second.
        transposed: the matrices are [experts, in, out].
    """
    layer.activation, layer.transposed = activation, transposed
    # By matrix, what an adapter adds to its product: see trainer.layers.adapters.lora_experts.
    layer.adapters = nn.ModuleDict()
    layer.adapter_enabled = True
    # Set by trainer.parallel: these experts are a part of all; gradients are one rank's part.
    layer.exchange, layer.partial_gradient = None, False
    patch_forward(layer, forward)


def layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The experts of each block, by name."""
    for name, module in model.named_modules():
        if hasattr(module, "transposed") and hasattr(module, MATRICES[0]):
            yield name, module


def quantise(layer: nn.Module) -> None:
    """Make both matrices NF4; on the meta device."""
    for name in MATRICES:
        nf4.pack_weight(layer, name)


def forward(
    layer: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of each token's experts.

    Args:
        hidden: [tokens, dim].
        index: int64 [tokens, active], which experts; weights: their shares of the output.
    """
    tokens, active = index.shape
    chosen = index.flatten()
    compute = apply if layer.exchange is None else layer.exchange
    out = compute(layer, hidden, chosen, active) * weights.reshape(-1, 1)
    return out.unflatten(0, (tokens, active)).sum(1).to(hidden.dtype)


def apply(
    layer: nn.Module, rows: torch.Tensor, chosen: torch.Tensor, active: int = 1
) -> torch.Tensor:
    """Each row, [rows, dim], through `active` of the experts that this rank has.

    `chosen`, int64 [rows x active], has them row by row; so has the output, [rows x active, dim].
    """
    count = local(getattr(layer, MATRICES[0])).shape[0]
    return compute(layer, rows, chosen.argsort(stable=True), counts(chosen, count), active)


def compute(
    layer: nn.Module,
    rows: torch.Tensor,
    order: torch.Tensor,
    numbers: torch.Tensor,
    active: int = 1,
) -> torch.Tensor:
    """As `apply`, of rows whose order by expert is known, int64 [rows x active].

    numbers: int64 [experts], how many each gets.
    """
    back, ends = inverse(order), numbers.cumsum(0).to(torch.int32)
    x = permuted(rows, order, back, active)
    x = layer.activation(layer, _product(layer, MATRICES[0], x, ends, numbers))
    return permuted(_product(layer, MATRICES[1], x, ends, numbers), back, order)


def inverse(order: torch.Tensor) -> torch.Tensor:
    """What undoes `order`, int64 [rows]."""
    numbers = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, numbers)


def counts(chosen: torch.Tensor, count: int) -> torch.Tensor:
    """How often each of `count` numbers is in `chosen`, int64 [count], without a wait."""
    return chosen.new_zeros(count).scatter_add(0, chosen, torch.ones_like(chosen))


def _product(
    layer: nn.Module, name: str, x: torch.Tensor, ends: torch.Tensor, numbers: torch.Tensor
) -> torch.Tensor:
    """One matrix with adapter and bias; x is sorted by expert, each has `numbers`, up to `ends`."""

    def part(parameter: torch.Tensor) -> torch.Tensor:
        return local(parameter, partial_gradient=layer.partial_gradient)

    weight = part(getattr(layer, name))
    if hasattr(layer, "nf4_table"):
        out = _Packed.apply(x, weight, layer.nf4_table, ends, layer.transposed)
    else:
        out = grouped(x, weight if layer.transposed else weight.transpose(1, 2), ends)
    if name in layer.adapters and layer.adapter_enabled:
        out = out + layer.adapters[name](x, ends, part, layer.scaling)
    bias = getattr(layer, name + BIAS, None)
    if bias is None:
        return out
    ids = torch.arange(len(numbers), device=x.device)
    return out + part(bias)[ids.repeat_interleave(numbers, output_size=x.shape[0])]


def grouped(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x [rows, in] by weight [experts, in, out]: rows up to ends[0] by the first, and so on.

    It is torch's grouped product. That takes nothing but bf16 on fake tensors, and so under the
    compiler: there it is an operator of our own.
    """
    real = type(x) is torch.Tensor and not x.is_meta and not torch.compiler.is_compiling()
    takes = (real or x.dtype is torch.bfloat16) and _aligned(x, weight)
    if takes and not _leaves_gaps(x):
        return F.grouped_mm(x, weight, offs=ends)
    return _grouped(x, weight, ends)


def _aligned(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether torch's grouped product takes them, by the lengths of their rows."""
    return not (one.shape[1] % MULTIPLE or other.shape[-1] % MULTIPLE)


def _leaves_gaps(x: torch.Tensor) -> bool:
    """Whether torch's product leaves the gradient of an expert without rows as it finds it.

    That is reported for compute capability 10 (github.com/pytorch/pytorch/issues/172439), where
    nothing was tested; torch's own derivative would not zero it.
    """
    return x.is_cuda and _capability() == 10


@torch.compiler.assume_constant_result
def _capability() -> int:
    return torch.cuda.get_device_capability()[0]


def zeroed_without_rows(gradient: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """`gradient`, [experts, in, out], with zeros for the experts without rows, in place."""
    empty = ends.diff(prepend=ends.new_zeros(1)) == 0
    return gradient.masked_fill_(empty.view(-1, 1, 1), 0)


@torch.library.custom_op("slurm_cookbook::grouped", mutates_args=())
def _grouped(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if _aligned(x, weight):
        return F.grouped_mm(x, weight, offs=ends)
    out, start = x.new_empty(x.shape[0], weight.shape[2]), 0
    for expert, end in enumerate(ends.tolist()):
        torch.mm(x[start:end], weight[expert], out=out[start:end])
        start = end
    return out


@_grouped.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.custom_op("slurm_cookbook::grouped_weight", mutates_args=())
def _grouped_weight(x: torch.Tensor, gradient: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The gradient of the weights, [experts, in, out]; zeros for an expert without a row."""
    if _aligned(x, gradient):
        product = F.grouped_mm(x.T, gradient, offs=ends)
        return zeroed_without_rows(product, ends) if _leaves_gaps(x) else product
    out, start = x.new_empty(len(ends), x.shape[1], gradient.shape[1]), 0
    for expert, end in enumerate(ends.tolist()):
        torch.mm(x[start:end].T, gradient[start:end], out=out[expert])
        start = end
    return out


@_grouped_weight.register_fake
def _(x: torch.Tensor, gradient: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], gradient.shape[1])


def _grouped_backward(
    ctx: Any, gradient: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
    x, weight, ends = ctx.saved_tensors
    gradient = gradient.contiguous()
    for_x = for_weight = None
    if ctx.needs_input_grad[0]:
        for_x = _grouped(gradient, weight.transpose(1, 2), ends)
    if ctx.needs_input_grad[1] and weight.stride(1) == 1:
        # In the layout of the parameter, which is transposed here: autograd would copy another.
        for_weight = _grouped_weight(gradient, x, ends).transpose(1, 2)
    elif ctx.needs_input_grad[1]:
        for_weight = _grouped_weight(x, gradient, ends)
    return for_x, for_weight, None


_grouped.register_autograd(
    _grouped_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


class _Packed(torch.autograd.Function):
    """A grouped product with NF4 weights, of which only the packed ones are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        packed: torch.Tensor,
        table: torch.Tensor,
        ends: torch.Tensor,
        transposed: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(packed, table, ends)
        ctx.transposed = transposed
        weight = nf4.dequantise(packed, table, x.dtype)
        return grouped(x, weight if transposed else weight.transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        packed, table, ends = ctx.saved_tensors
        if torch.compiler.is_compiling():
            packed = nf4.later(packed, gradient)
        weight = nf4.dequantise(packed, table, gradient.dtype)
        weight = weight.transpose(1, 2) if ctx.transposed else weight
        return grouped(gradient.contiguous(), weight, ends), None, None, None, None


def permuted(
    rows: torch.Tensor, order: torch.Tensor, back: torch.Tensor, copies: int = 1
) -> torch.Tensor:
    """As many copies of each of `rows`, [rows, dim], one after the other, then sorted by `order`.

    `back` undoes the order, which is the backward pass, the same bit by bit each time.
    """
    return _Permuted.apply(rows, order, back, copies)


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, order: torch.Tensor, back: torch.Tensor, copies: int
    ) -> torch.Tensor:
        ctx.save_for_backward(back)
        ctx.copies = copies
        return rows.index_select(0, order if copies == 1 else order // copies)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        gradient = gradient.index_select(0, back)
        if ctx.copies > 1:
            gradient = gradient.unflatten(0, (-1, ctx.copies)).sum(1)
        return gradient, None, None, None


@torch.no_grad()
def merged(layer: nn.Module, name: str, expert: int, dtype: torch.dtype) -> torch.Tensor:
    """The whole matrix that the layer computes one expert with, in its own layout; all ranks
    together.

    The ranks that have a part of the expert merge it, and the others get it: the experts of a
    layer, merged on every GPU, would take several times their memory.
    """
    stack = getattr(layer, name).detach()
    factors = layer.adapters[name].of(expert) if name in layer.adapters else None
    own, row = local(stack), row_of(stack, expert)
    if row is None:
        part = own.new_empty(nf4.dense_shape(own)[1:], dtype=dtype)
        return gathered_row(stack, near(stack, part), expert)
    part = near(stack, own[row])
    if hasattr(layer, "nf4_table"):
        part = nf4.dequantise(part, layer.nf4_table, dtype)
    if factors is not None:
        _, rows, columns = nf4.dense_place(stack)
        a, b = (each.float() for each in factors)
        left, right = (a.T[rows], b.T[:, columns]) if layer.transposed else (b[rows], a[:, columns])
        part = part.to(torch.float32, copy=True).addmm_(left, right, alpha=layer.scaling)
    return gathered_row(stack, part.to(dtype), expert)
