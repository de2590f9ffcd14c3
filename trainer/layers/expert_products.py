"""Products of each expert's rows with its matrix, in Triton, for GPUs where torch has no kernel.

Below compute capability 9 (A100, L40S), and on AMD's, torch's `grouped_mm` reads the numbers of
rows on the host and starts a product for each expert. Here one kernel finds the expert of each of
its tiles on the GPU, so that nothing waits. bf16, summed in fp32. Rows of any length are taken, and
experts without rows.
"""

import torch
import triton
import triton.language as tl

# Of the lists for matrix products in Triton's tutorial 03, for CUDA and for HIP. Not tuned: no GPU
# was there to measure. For sm_80 they take 48 KiB of shared memory, and no register is spilled.
TILE, DEPTH, WARPS = 128, 32, 4
STAGES = 2 if torch.version.hip else 4


def by_rows(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x [rows, in] by weight [experts, in, out], of any strides: [rows, out].

    Args:
        ends: int32 [experts], where each expert's rows end.
    """
    (rows, inputs), (experts, _, outputs) = x.shape, weight.shape
    out = x.new_empty(rows, outputs)
    # At most: each expert may end with a tile that is not full. Tiles beyond these do nothing.
    tiles = triton.cdiv(rows, TILE) + experts
    _by_rows[(triton.cdiv(outputs, TILE), tiles)](
        x,
        weight,
        out,
        ends,
        inputs,
        outputs,
        *x.stride(),
        *weight.stride(),
        experts,
        triton.next_power_of_2(experts),
        TILE,
        DEPTH,
        num_stages=STAGES,
        num_warps=WARPS,
    )
    return out


def by_weights(x: torch.Tensor, gradient: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The gradient of the weights, [experts, in, out], of x [rows, in] and gradient [rows, out]."""
    experts, inputs, outputs = len(ends), x.shape[1], gradient.shape[1]
    out = x.new_empty(experts, inputs, outputs)
    _by_weights[(triton.cdiv(outputs, TILE), triton.cdiv(inputs, TILE), experts)](
        x,
        gradient,
        out,
        ends,
        inputs,
        outputs,
        *x.stride(),
        *gradient.stride(),
        TILE,
        DEPTH,
        num_stages=STAGES,
        num_warps=WARPS,
    )
    return out


@triton.jit
def _by_rows(
    x,
    weight,
    out,
    ends,
    inputs,
    outputs,
    x_row,
    x_in,
    weight_expert,
    weight_in,
    weight_out,
    experts: tl.constexpr,
    padded: tl.constexpr,
    tile: tl.constexpr,
    depth: tl.constexpr,
):
    """A tile of one expert's rows, by a tile of the outputs."""
    each = tl.arange(0, padded)
    last = tl.load(ends + each, mask=each < experts, other=0)
    first = tl.load(ends + each - 1, mask=(each > 0) & (each < experts), other=0)
    tiles = tl.where(each < experts, (last - first + tile - 1) // tile, 0)
    behind = tl.cumsum(tiles, 0)
    index = tl.program_id(1)
    expert = tl.sum((behind <= index).to(tl.int32), 0)
    if expert < experts:
        own = each == expert
        within = index - tl.sum(tl.where(own, behind - tiles, 0), 0)
        begin = tl.sum(tl.where(own, first, 0), 0) + within * tile
        end = tl.sum(tl.where(own, last, 0), 0)
        rows = (begin + tl.arange(0, tile)).to(tl.int64)
        columns = tl.program_id(0) * tile + tl.arange(0, tile)
        inner = tl.arange(0, depth)
        left = x + rows[:, None] * x_row + inner[None, :] * x_in
        right = weight + expert.to(tl.int64) * weight_expert
        right += inner[:, None] * weight_in + columns[None, :].to(tl.int64) * weight_out
        total = tl.zeros((tile, tile), dtype=tl.float32)
        for start in range(0, inputs, depth):
            here = inner < inputs - start
            a = tl.load(left, mask=(rows < end)[:, None] & here[None, :], other=0.0)
            b = tl.load(right, mask=here[:, None] & (columns < outputs)[None, :], other=0.0)
            total = tl.dot(a, b, total)
            left += depth * x_in
            right += depth * weight_in
        into = out + rows[:, None] * outputs + columns[None, :]
        kept = (rows < end)[:, None] & (columns < outputs)[None, :]
        tl.store(into, total.to(out.dtype.element_ty), mask=kept)


@triton.jit
def _by_weights(
    x,
    gradient,
    out,
    ends,
    inputs,
    outputs,
    x_row,
    x_in,
    gradient_row,
    gradient_out,
    tile: tl.constexpr,
    depth: tl.constexpr,
):
    """A tile of one expert's matrix: the sum over its rows, zeros if it has none."""
    expert = tl.program_id(2)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    ins = tl.program_id(1) * tile + tl.arange(0, tile)
    columns = tl.program_id(0) * tile + tl.arange(0, tile)
    inner = tl.arange(0, depth)
    total = tl.zeros((tile, tile), dtype=tl.float32)
    for start in range(begin, end, depth):
        rows = (start + inner).to(tl.int64)
        here = rows < end
        left = x + rows[None, :] * x_row + ins[:, None] * x_in
        right = gradient + rows[:, None] * gradient_row + columns[None, :] * gradient_out
        a = tl.load(left, mask=(ins < inputs)[:, None] & here[None, :], other=0.0)
        b = tl.load(right, mask=here[:, None] & (columns < outputs)[None, :], other=0.0)
        total = tl.dot(a, b, total)
    wide = ins.to(tl.int64)[:, None] * outputs + columns[None, :]
    into = out + expert.to(tl.int64) * inputs * outputs + wide
    kept = (ins < inputs)[:, None] & (columns < outputs)[None, :]
    tl.store(into, total.to(out.dtype.element_ty), mask=kept)
