"""A frozen base in 4 bits, stored so that every layout can shard it.

NF4, the 4-bit NormalFloat of QLoRA: a weight [out, in] becomes one frozen uint8 parameter
[out, in / 64, 34]. Of each block of 64 neighbouring inputs, 32 bytes hold two codes each (the first
in the high half) and 2 bytes the block's scale, its largest magnitude, in bf16. That is 0.53 bytes
per weight. Dimension 0 is the outputs and dimension 1 whole blocks, so FSDP and tensor parallelism
shard it like any other tensor, and the values do not depend on where it is cut.

Source: Dettmers et al. 2023, QLoRA (arXiv 2305.14314), without its second quantisation of
the scales. The code table and the rounding to the nearest code are bitsandbytes'; the scale of a
bf16 weight is exact, so that its codes and values are those that bitsandbytes computes too.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from runspec.layout import NF4_BLOCK
from trainer.sharded import place_of

# Values that are computed at once outside of compiled code: 256 MiB in fp32.
AT_A_TIME = 2**26
BLOCK = NF4_BLOCK
SCALE_BYTES = 2
PACKED_BYTES = BLOCK // 2 + SCALE_BYTES
# Quantiles of the normal distribution, scaled to [-1, 1], with an exact zero.
VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


def is_packed(parameter: torch.Tensor) -> bool:
    """True for a parameter that holds blocks of codes."""
    return parameter.dtype == torch.uint8


def dense_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """The shape of the weight that a parameter represents, packed or not."""
    if not is_packed(parameter):
        return tuple(parameter.shape)
    return *parameter.shape[:-2], parameter.shape[-2] * BLOCK


def dense_numel(parameter: torch.Tensor) -> int:
    """Number of weights that a parameter represents, packed or not."""
    return math.prod(dense_shape(parameter))


def dense_place(parameter: torch.Tensor) -> tuple[slice, ...]:
    """The place of this rank's part in a weight, packed or not: a slice per dimension."""
    place = place_of(parameter)
    if not is_packed(parameter):
        return place
    *others, blocks, _ = place
    if blocks == slice(None):
        return *others, blocks
    return *others, slice(blocks.start * BLOCK, blocks.stop * BLOCK)


def faults(weights: Iterable[torch.Tensor]) -> list[str]:
    """Return one line per last dimension of the weights that is no multiple of a block."""
    widths = {weight.shape[-1] for weight in weights}
    return [
        f"model.quantize_base: needs inputs in blocks of {BLOCK}, and this model has layers "
        f"with {width} inputs; set model.quantize_base=False"
        for width in sorted(widths)
        if width % BLOCK
    ]


def pack_weight(layer: nn.Module, name: str = "weight") -> None:
    """Make `layer.weight` (on the meta device, [..., out, in]) a packed one; add the code table.

    The table is the buffer `nf4_table` [256, 2], fp32: what each byte of codes stands for. It is a
    buffer, so that no step copies it to the GPU. `fill_tables` fills it.
    """
    weight = getattr(layer, name)
    *others, inputs = weight.shape
    packed = weight.new_empty(*others, inputs // BLOCK, PACKED_BYTES, dtype=torch.uint8)
    setattr(layer, name, nn.Parameter(packed, requires_grad=False))
    table = weight.new_empty(256, 2, dtype=torch.float32)
    layer.register_buffer("nf4_table", table, persistent=False)


def fill_tables(model: nn.Module) -> None:
    """Fill the code table of every packed layer."""
    for name, buffer in model.named_buffers():
        if name.endswith("nf4_table"):
            buffer.copy_(table())


def table() -> torch.Tensor:
    """The values of a byte's high and low half, [256, 2] in fp32."""
    values = torch.tensor(VALUES)
    return torch.cartesian_prod(values, values)


def quantise(weight: torch.Tensor) -> torch.Tensor:
    """[..., in] in any floating dtype to packed [..., in / 64, 34] uint8, where it is."""
    blocks = weight.unflatten(-1, (-1, BLOCK)).float()
    scale = blocks.abs().amax(-1, keepdim=True).bfloat16()
    # A block of zeros has scale 0, and any divisor keeps it zero.
    shares = blocks / torch.where(scale == 0, 1, scale).float()
    values = torch.tensor(VALUES, device=weight.device)
    indices = torch.bucketize(shares, (values[1:] + values[:-1]) / 2, out_int32=True)
    pairs = indices.to(torch.uint8).unflatten(-1, (-1, 2))
    codes = pairs[..., 0] << 4 | pairs[..., 1]
    return torch.cat([codes, scale.view(torch.uint8)], dim=-1)


def dequantise(packed: torch.Tensor, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Packed [..., in / 64, 34] to [..., in] in `dtype`; `table` as `table()` makes it."""
    *others, blocks, _ = packed.shape
    rows = max(1, AT_A_TIME * others[0] // (math.prod(others) * blocks * BLOCK))
    if torch.compiler.is_compiling() or rows >= others[0]:
        return _dequantised(packed, table, dtype)
    # In the values' fp32 the experts of a layer would take several times their own memory.
    dense = packed.new_empty(*others, blocks * BLOCK, dtype=dtype)
    for part, into in zip(packed.split(rows), dense.split(rows), strict=True):
        into.copy_(_dequantised(part, table, dtype))
    return dense


def _dequantised(packed: torch.Tensor, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Older torch's FSDP casts whatever it gathers: the bytes then arrive as bf16 or fp32, which
    # hold 0 to 255 exactly.
    packed = packed.to(torch.uint8)
    codes = packed[..., :-SCALE_BYTES].int()
    # bf16 is the upper half of fp32. Bytes put together so are part of one compiled kernel.
    low, high = (packed[..., i - SCALE_BYTES, None].int() for i in range(SCALE_BYTES))
    scale = (low << 16 | high << 24).view(torch.float32)
    if dtype == torch.bfloat16 and torch.compiler.is_compiling():
        return _pairs(codes, scale, table).flatten(-2)
    values = F.embedding(codes, table).flatten(-2)
    return values.mul_(scale).to(dtype).flatten(-2)


def _pairs(codes: torch.Tensor, scale: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Bytes of codes [..., blocks, 32], int32, to bf16 [..., blocks, 64]; for compiled code.

    A byte's two values are put together as one int32, so that a thread of the kernel has a byte and
    not a weight. Per weight it then makes 2.25 loads, where the other form makes 4 (torch 2.14's
    code for sm_90). The values are looked up among 16, which lie in one line of the cache: a warp
    reads 32 of them at once, but not of 512, which share its banks.
    """
    values = table[: len(VALUES), 1:]
    first, second = (
        (F.embedding(code, values).squeeze(-1) * scale).bfloat16().view(torch.int16).int()
        for code in (codes >> 4, codes & 15)
    )
    # The first is at the lower address: GPUs and the CPUs beside them are little-endian.
    return (second << 16 | first & 0xFFFF).view(torch.bfloat16)


def linear(x: torch.Tensor, packed: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """F.linear of x [..., in] with a packed weight [out, in / 64, 34], in x's dtype.

    Only the packed weight is kept for the backward pass, which dequantises it again; it gets no
    gradient.
    """
    return _Linear.apply(x, packed, table)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, packed: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(packed, table)
        return F.linear(x, dequantise(packed, table, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        packed, table = ctx.saved_tensors
        if torch.compiler.is_compiling():
            packed = later(packed, gradient)
        return gradient @ dequantise(packed, table, gradient.dtype), None, None


def later(packed: torch.Tensor, event: torch.Tensor) -> torch.Tensor:
    """`packed`, of which compiled code can compute nothing before `event`.

    Otherwise the compiler would dequantise once for both passes, and keep the dense weight of every
    layer, or its codes as int32, from its forward to its backward pass. It is not a copy, which
    would add 1/5 to the memory traffic of dequantising twice: the kernel reads one byte more.
    """
    return packed.to(torch.uint8) | _zero_after(event)


@torch.library.custom_op("slurm_cookbook::zero_after", mutates_args=())
def _zero_after(event: torch.Tensor) -> torch.Tensor:
    """0, [1] in uint8, which the compiler does not know."""
    return event.new_zeros(1, dtype=torch.uint8)


@_zero_after.register_fake
def _(event: torch.Tensor) -> torch.Tensor:
    return event.new_empty(1, dtype=torch.uint8)
