"""What forward keeps for backward on one rank, and what backward works with.

Symbols as in `plugins.estimate.launcher.memory`; r rows of the experts, as every token has one for
each expert that it meets. Sources: saved activations in the manner of Korthikanti et al. 2022
(arXiv 2205.05198) section 4, with flash attention (Dao 2023, arXiv 2307.08691).
"""

from __future__ import annotations

from plugins.estimate.launcher.step_config import FP32, StepConfig
from runspec.shape import DELTA_CHUNK, Attention, Block, GatedDelta, Part

# Rows of the GPU whose experts are chosen most, divided by the mean of the GPUs that share them. An
# assumption.
EXPERT_IMBALANCE = 1.5


def saved_by_layer(step: StepConfig, block: Block) -> float:
    """Bytes that one layer keeps for backward without activation checkpointing.

    Norms compute in fp32: 4td for the input, and if the scale is trained the normalised one too, in
    fp32 or in the dtype of the computation. A matrix keeps its input if it is trained or has an
    adapter: etd for all that read a norm's output together. Tensor parallelism divides all but the
    gathered inputs. Compiled layers compute again what is made element by element: they keep a
    norm's input, etd.
    """
    e, tp, t = step.element_bytes, step.layout.tensor_parallel, step.tokens
    scaled = FP32 if step.shape.wide_norms else e
    norm = e if step.compiled else FP32 + (scaled if step.is_full else 0)
    saved: float = norm * t * sum(vector.features for vector in block.vectors) / tp
    # What attention's first matrices read: the hidden state once, latents (arXiv 2405.04434).
    first = block.of("attention", "column", "fused", "replicated")
    saved += e * t * sum({m.inputs for name, m in first if step.needs_input(name)})
    if block.attention:
        saved += _attention(step, block, block.attention)
    if block.delta:
        saved += _linear_attention(step, block, block.delta)
    if block.experts:
        saved += _experts(step, block)
    else:
        reads = step.trains(block, "mlp", "column", "fused")
        saved += e * t * step.shape.dim * reads + _mlp(step, block, "mlp")
    return saved + _adapters(step, block)


def _attention(step: StepConfig, block: Block, attention: Attention) -> float:
    """e t for each number of queries, keys, the product that values are a part of, and the output;
    4t per head for the log-sum. A gate keeps itself, its sigmoid if nothing is compiled, and what
    it is multiplied with. In fp32 there is no flash attention: each query head has its keys.
    """
    e, t, heads = step.element_bytes, step.tokens, attention.heads
    copied = heads / attention.kv_heads if e == FP32 else 1.0
    kept: float = attention.query_width + attention.value_width + attention.held
    kept += copied * attention.kv_width
    kept += (copied - 1) * attention.kv_heads * attention.value_dim
    kept += attention.gate * (1 + (not step.compiled) + step.trains(block, "attention", "row"))
    return t * (e * kept + FP32 * heads) / step.layout.tensor_parallel


def _linear_attention(step: StepConfig, block: Block, delta: GatedDelta) -> float:
    """The gated delta rule of trainer.layers.delta, in fp32 and chunk by chunk.

    The convolution's output, and if it is trained its input at each of its positions; eight forms
    of the keys, three of the values, five matrices of pairs in each chunk, every chunk's state; of
    the gated norm its input, compiled, else three forms of it. Counted by hooks on the saved
    tensors of one layer.
    """
    e, key, value = step.element_bytes, delta.value_heads * delta.key, delta.value_width
    each: float = e * ((1 + delta.kernel * step.is_full) * delta.mixed + value)
    pairs = (5 - step.compiled) * DELTA_CHUNK * delta.value_heads
    each += FP32 * (8 * key + 3 * value + pairs + delta.state / DELTA_CHUNK)
    each += value * (e if step.compiled else 3 * FP32)
    each += e * value * step.trains(block, "attention", "row")
    return step.tokens * each / step.layout.tensor_parallel


def _mlp(step: StepConfig, block: Block, part: Part) -> float:
    """e t f each for the output of gate and of up, for the activation, and for their product if
    the last matrix needs it; compiled layers keep no activation, and without a gate it is the
    product."""
    width = block.inside(part)
    made = sum(matrix.outputs for _, matrix in block.of(part, "column", "fused"))
    kept = width * (step.trains(block, part, "row") + (made > width and not step.compiled))
    return step.element_bytes * step.tokens * (made + kept) / step.layout.tensor_parallel


def expert_rows(step: StepConfig, block: Block, *, received: bool = False) -> float:
    """Rows of a rank's own tokens, one for each expert that they meet; 0 without experts.

    received: those that its experts take: with expert parallelism at most this many of all ranks'.
    """
    rows = step.tokens / step.layout.tensor_parallel
    rows *= block.experts[0].active if block.experts else 0
    spread = received and step.layout.expert_parallel > 1
    return rows * (EXPERT_IMBALANCE if spread else 1)


def _experts(step: StepConfig, block: Block) -> float:
    """The experts' inputs in their order, as a dense MLP's rows from there on, and their outputs.

    Experts that are spread over ranks are outside of what is compiled; those
    with a bias cap their gate and have an activation of their own, in four parts.
    """
    e, t, d = step.element_bytes, step.tokens / step.layout.tensor_parallel, step.shape.dim
    rows, width = expert_rows(step, block, received=True), block.inside("experts")
    compiled = step.compiled and step.layout.expert_parallel == 1
    between = (1 if compiled else 4) if block.experts[0].bias else not compiled
    trained = step.trains(block, "experts")
    saved: float = e * rows * (d * trained + width * (2 + between + trained))
    saved += e * d * expert_rows(step, block)
    saved += e * t * d * step.trains(block, "shared", "column")
    return saved + _mlp(step, block, "shared")


def _adapters(step: StepConfig, block: Block) -> float:
    """What the kind of adapter says of each token, and of dropout the mask and the result."""
    e, tp, kind = step.element_bytes, step.layout.tensor_parallel, step.adapter
    if kind is None:
        return 0.0
    saved = sum(step.adapter_size(sizes, {}, block) for sizes in kind.saved_of("block")) / tp
    saved *= e * step.tokens
    for _, matrix in step.adapted(block):
        expert, split = matrix.role == "expert", step.split_of(matrix)
        rows = expert_rows(step, block, received=True) if expert else step.tokens
        by_row = matrix.role == "row"
        known = {"lora_rank": float(step.lora_rank), "in": matrix.inputs, "out": matrix.outputs}
        known["in" if by_row else "out"] /= 1 if expert else split
        saved += (1 + e) * rows * known["in"] * (step.dropout and not expert)
        for sizes in kind.saved_of(*matrix.owners):
            # Compiled layers compute again what is made element by element, in an MLP.
            if sizes == ("lora_rank",) or not (step.compiled and matrix.part == "mlp"):
                saved += e * rows * step.adapter_size(sizes, known, block)
    return saved


def kept_by_layer(step: StepConfig, block: Block, recomputed: bool) -> tuple[float, float]:
    """(bytes a layer keeps from forward to backward, bytes that backward computes again)."""
    whole = saved_by_layer(step, block)
    if not recomputed:
        return whole, 0.0
    entry = step.element_bytes * step.tokens * step.shape.dim / step.layout.tensor_parallel
    entry = 0.0 if step.activation_offload else entry
    by_operation = step.checkpointing == "op" and not block.delta
    return entry + (saved_products(step, block) if by_operation else 0.0), whole


def saved_products(step: StepConfig, block: Block) -> float:
    """Selective checkpointing by operation: matrix products, attention and communication.

    One product per matrix and two per adapter; attention's output and log-sum; under tensor
    parallelism the gathered inputs, and what is scattered. Compiled layers keep none of the
    products that ranks exchange, nor that of the MLP's last matrix if no norm is behind it.
    A layer with linear attention is recomputed whole.
    """
    e, tp, t, d = step.element_bytes, step.layout.tensor_parallel, step.tokens, step.shape.dim
    kept = 0.0
    if block.attention:
        kept += t * (e * block.attention.value_width + FP32 * block.attention.heads) / tp
    for name, matrix in block.matrices.items():
        split, by_row, expert = step.split_of(matrix), matrix.role == "row", matrix.role == "expert"
        exchanged = split > 1 and matrix.role in ("row", "fused")
        last = by_row and matrix.part == "mlp" and not block.norms_behind
        if step.compiled and (exchanged or last):
            continue
        width = matrix.outputs / (1 if by_row or expert else split)
        rows = t if matrix.part in ("attention", "mlp") else t / tp
        rows = expert_rows(step, block, received=True) if expert else rows
        kept += e * rows * width
        if name in step.lora_targets and step.lora_rank:
            kept += e * rows * (width + step.lora_rank)
    if tp > 1:
        kept += e * t * d * (1 if block.experts else 2) * (1 + 1 / tp)
    return kept


# What a layer works with --------------------------------------------------------------------------


def working(step: StepConfig, block: Block, backward: bool) -> float:
    """What the pass of a layer's MLP, or of its experts, works with, beside what it keeps.

    Forward: gate, activation and product where nothing keeps them. Backward: the gradients of the
    product and of what comes before it; of experts the gradient of their outputs in both orders.
    With both, the residual twice, and of a quantised base the largest matrix in the compute dtype.
    """
    e, tp, t, d = step.element_bytes, step.layout.tensor_parallel, step.tokens, step.shape.dim
    entry, dequantised = e * t * d / tp, 0.0
    if step.is_quantised:
        sizes = (m.parameters / step.split_of(m) for m in block.matrices.values())
        dequantised = e * max(sizes)
    if block.experts:
        rows, width = e * expert_rows(step, block, received=True), block.inside("experts")
        return rows * (2 * d + width) + dequantised + 2 * entry
    inside = e * t * block.inside("mlp") / tp
    if not backward:
        return (3 * inside if step.checkpointing != "none" else 0.0) + dequantised + 3 * entry
    return max(2 * inside, inside + dequantised) + 2 * entry
