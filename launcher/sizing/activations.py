"""What forward keeps for backward on one rank, and what backward works with.

Symbols as in `launcher.sizing.memory`; r rows of the experts, as every token has one for each
expert that it meets. Sources: saved activations in the manner of Korthikanti et al. 2022 (arXiv
2205.05198) section 4, with flash attention (Dao 2023, arXiv 2307.08691).

Each function is of one layer, whose kind is `block`.
"""

from __future__ import annotations

from launcher.sizing.step_config import FP32, StepConfig
from runspec.shape import DELTA_CHUNK, Attention, Block, GatedDelta, Matrix, Part


def saved_by_layer(step: StepConfig, block: Block) -> float:
    """Bytes that one layer keeps for backward without activation checkpointing.

    Norms compute in fp32: 4td for the input, and if the scale is trained the normalised one too, in
    fp32 or in the dtype of the computation. A matrix keeps its input if it is trained or has an
    adapter: etd for all that read a norm's output together, nothing new for attention's own output.
    Tensor parallelism divides all but the gathered inputs. Compiled layers compute again what is
    made element by element: they keep a norm's input, etd.
    """
    saved = _saved_by_norms(step, block) + _saved_by_adapters(step, block)
    if block.attention:
        saved += _saved_by_attention(step, block, block.attention)
    if block.delta:
        saved += _saved_by_linear_attention(step, block, block.delta)
    if block.experts:
        return saved + _saved_by_experts(step, block)
    inputs = step.element_bytes * step.tokens * step.shape.dim
    return saved + inputs * step.trains(block, "mlp", "column", "fused") + _mlp(step, block, "mlp")


def _saved_by_norms(step: StepConfig, block: Block) -> float:
    """Of the tokens or heads of this rank, but for those of latents, which are whole."""
    latent, saved = block.attention is not None and block.attention.latent, 0.0
    for vector in block.vectors:
        whole = latent and vector.rows != step.shape.dim
        saved += vector.features / (1 if whole else step.layout.tensor_parallel)
    return _norm_bytes(step) * step.tokens * saved


def _norm_bytes(step: StepConfig) -> float:
    """Bytes per number of a norm's input."""
    if step.compiled:
        return step.element_bytes
    scaled = FP32 if step.shape.wide_norms else step.element_bytes
    return FP32 + (scaled if step.is_full else 0)


def _saved_by_attention(step: StepConfig, block: Block, attention: Attention) -> float:
    """e t for each number of queries, keys, values and the output; 4t per head for the log-sum.

    Values stay with all of the product that they are a part of; compiled latent attention makes
    them again. A gate keeps itself, its sigmoid if nothing is compiled, and what it is multiplied
    with. Latents are whole on each rank.
    """
    e, tp, t = step.element_bytes, step.layout.tensor_parallel, step.tokens
    inputs = _inputs(step, block)
    # Flash attention shares the heads of keys and values; in fp32 there is none: they are copied.
    heads = attention.kv_heads if e < FP32 else attention.heads
    kept = attention.query_width + attention.value_width
    kept += heads * (attention.head_dim + attention.value_dim)
    if not (attention.latent and step.compiled):
        kept += attention.held - attention.kv_heads * attention.value_dim
    kept += attention.gate * (1 + (not step.compiled) + step.trains(block, "attention", "row"))
    return e * t * (inputs + kept / tp) + FP32 * t * attention.heads / tp


def _inputs(step: StepConfig, block: Block) -> int:
    """Numbers per token that attention's first matrices read: the hidden state once, latents."""
    read: dict[str, int] = {}
    for name, matrix in block.of("attention", "column", "fused", "replicated"):
        if step.needs_input(name):
            read["" if matrix.inputs == step.shape.dim else name] = matrix.inputs
    return sum(read.values())


def _saved_by_linear_attention(step: StepConfig, block: Block, delta: GatedDelta) -> float:
    """The gated delta rule of trainer.layers.delta, in fp32 and chunk by chunk.

    The convolution's output, and if it is trained its input at each of its positions; queries and
    keys before their norm, normalised and decayed, keys times their rate, and those
    that read the state; values, the new ones, and what the state does not predict of them; five
    matrices of pairs in each chunk; every chunk's state; the gated norm's input, its gate and their
    product. Compiled layers keep one matrix of pairs less, the convolution's input once less, and
    of the gated norm its input only. Counted by hooks on the saved tensors of one layer.
    """
    e, t, tp = step.element_bytes, step.tokens, step.layout.tensor_parallel
    key, value = delta.value_heads * delta.key, delta.value_width
    convolved = 1 + (delta.kernel - step.compiled) * step.is_full
    saved: float = e * t * (convolved * delta.mixed + value)
    pairs = (5 - step.compiled) * DELTA_CHUNK * delta.value_heads
    saved += FP32 * t * (8 * key + 3 * value + pairs + delta.state / DELTA_CHUNK)
    saved += t * value * (e if step.compiled else 3 * FP32 + e * step.is_full)
    saved += e * t * value * step.trains(block, "attention", "row")
    return e * t * _inputs(step, block) + saved / tp


def _mlp(step: StepConfig, block: Block, part: Part) -> float:
    """e t f each for the output of gate and of up, for the activation, and for their product if
    the last matrix needs it; compiled layers keep no activation, and without a gate it is the
    product."""
    width = block.inside(part)
    made = sum(matrix.outputs for _, matrix in block.of(part, "column", "fused"))
    kept = width * (step.trains(block, part, "row") + (made > width and not step.compiled))
    return step.element_bytes * step.tokens * (made + kept) / step.layout.tensor_parallel


def _own_tokens(step: StepConfig) -> float:
    return step.tokens / step.layout.tensor_parallel


def expert_rows(step: StepConfig, block: Block) -> float:
    """Rows of a rank's own tokens, one for each expert that they meet; 0 without experts."""
    return _own_tokens(step) * (block.experts[0].active if block.experts else 0)


def received_rows(step: StepConfig, block: Block) -> float:
    """Rows that a rank's experts take: of its own tokens, or at most so many of all ranks'."""
    spread = step.layout.expert_parallel > 1
    return expert_rows(step, block) * (step.expert_imbalance if spread else 1)


def _saved_by_experts(step: StepConfig, block: Block) -> float:
    """The experts' inputs in their order, as a dense MLP's rows from there on, and their outputs.

    The outputs stay, as the router's weights are multiplied with them: of the rank's own tokens.
    Each row has two numbers of eight bytes that say where it came from. The router keeps its
    probabilities, and its input if it is trained, in fp32 if it computes so.
    """
    e, t = step.element_bytes, _own_tokens(step)
    own, rows = expert_rows(step, block), received_rows(step, block)
    d, width = step.shape.dim, block.inside("experts")
    # Experts with a bias cap their gate and have an activation of their own, of which compiled
    # layers keep one part instead of four. Experts that are spread over ranks are outside of what
    # is compiled, as is the exchange of rows.
    compiled = step.compiled and step.layout.expert_parallel == 1
    between = (1 if compiled else 4) if block.experts[0].bias else not compiled
    trained = step.trains(block, "experts")
    saved: float = e * rows * (d * trained + width * (2 + between + trained))
    saved += e * own * d + 3 * 8 * rows
    saved += FP32 * t * block.experts[0].count
    saved += e * t * d * step.trains(block, "shared", "column")
    saved += FP32 * t * d * (block.wide_router and step.is_full)
    return saved + _mlp(step, block, "shared")


def _saved_by_adapters(step: StepConfig, block: Block) -> float:
    t, e, kind = step.tokens, step.element_bytes, step.adapter
    if kind is None:
        return 0.0
    # Between the blocks a rank has its own part of the sequence.
    own = e * _own_tokens(step)
    saved = sum(own * step.adapter_size(sizes, {}, block) for sizes in kind.saved_of("block"))
    for name, matrix in step.adapted(block):
        tp, by_row = step.split_of(matrix), matrix.role == "row"
        width = matrix.inputs / (tp if by_row else 1)
        if step.dropout and matrix.role != "expert":
            saved += (1 + e) * t * width
        # What compiled layers compute again: the product before an MLP's last matrix, and its sum.
        remade = step.compiled and matrix.part == "mlp"
        for sizes in kind.saved_of(*matrix.owners):
            if sizes == ("in",):
                saved += 0 if remade else e * t * width
            elif sizes == ("out",):
                # The sum that is scaled; a matrix split by rows has a share of all of it.
                saved += 0 if remade else e * t * matrix.outputs / (1 if by_row else tp)
            else:
                rows = received_rows(step, block) if matrix.role == "expert" else t
                known = {"lora_rank": step.rank_of(name)}
                saved += e * rows * step.adapter_size(sizes, known, block)
    return saved


def recomputed_elements(step: StepConfig, block: Block) -> float:
    """Bytes that one layer computes again, element by element, if products are kept ("op")."""
    return max(saved_by_layer(step, block) - saved_products(step, block), 0.0)


def kept_by_layer(step: StepConfig, block: Block, recomputed: bool) -> tuple[float, float]:
    """(bytes a layer keeps from forward to backward, bytes that backward computes again)."""
    whole = saved_by_layer(step, block)
    if not recomputed:
        return whole, 0.0
    entry = step.element_bytes * step.tokens * step.shape.dim / step.layout.tensor_parallel
    entry = 0.0 if step.activation_offload else entry
    if step.checkpointing == "op":
        return entry + saved_products(step, block), whole
    return entry, whole


def saved_products(step: StepConfig, block: Block) -> float:
    """Selective checkpointing by operation: matrix products, attention and communication.

    One product per matrix and two per adapter; attention's output and log-sum; of linear attention
    both products of pairs, three that are as wide as the values, and each chunk's state; under
    tensor parallelism the gathered inputs of attention and MLP, the whole output of the matrices
    that are split by rows, and what of it is scattered; experts, and what stands beside them, work
    on the rank's own part of the sequence. Compiled layers keep only what they compute with again.
    """
    e, tp, t, d = step.element_bytes, step.layout.tensor_parallel, step.tokens, step.shape.dim
    kept = 0.0
    if block.attention:
        kept += t * (e * block.attention.value_width + FP32 * block.attention.heads) / tp
    if delta := block.delta:
        pairs = 2 * DELTA_CHUNK * delta.value_heads
        kept += FP32 * t * (pairs + 3 * delta.value_width + delta.state / DELTA_CHUNK) / tp
    # Where no norm is behind the MLP, no backward pass needs the MLP's result.
    ends = not block.norms_behind
    for name, matrix in block.matrices.items():
        split, is_row = step.split_of(matrix), matrix.role == "row"
        exchanged = split > 1 and matrix.role in ("row", "fused")
        # Of these the layer needs nothing again, or only what other ranks have sent of it.
        if step.compiled and (exchanged or (ends and is_row and matrix.part == "mlp")):
            continue
        width = matrix.outputs if is_row else matrix.outputs / split
        rows = t if matrix.part in ("attention", "mlp") else t / tp
        if matrix.role == "expert":
            rows = received_rows(step, block)
        kept += e * rows * width
        if name in step.lora_targets and step.lora_rank:
            kept += e * rows * (width + step.rank_of(name))
    if tp == 1:
        return kept
    gathered = 1 if block.experts else 2
    scattered = gathered - (step.compiled and ends and not block.experts)
    return kept + e * t * (d * (gathered + scattered / tp) + sum(block.fused_widths) / tp)


# What a layer works with --------------------------------------------------------------------------


def _dequantised(step: StepConfig, block: Block) -> float:
    """NF4: the largest matrix, in the compute dtype, while it is multiplied; experts together."""
    if not step.is_quantised:
        return 0.0

    def numbers(matrix: Matrix) -> float:
        spread = step.layout.expert_parallel
        return matrix.parameters / (spread if matrix.role == "expert" else step.split_of(matrix))

    return step.element_bytes * max(map(numbers, block.matrices.values()))


def forward_working(step: StepConfig, block: Block) -> float:
    """A layer's MLP in forward: gate, activation and product, the norm's output, the residual.

    Of experts: the rows as they are and in order, or the output in both orders.
    """
    e, tp, t = step.element_bytes, step.layout.tensor_parallel, step.tokens
    width, kept = e * t * step.shape.dim, step.checkpointing == "none"
    if block.experts:
        rows = e * received_rows(step, block)
        inside = (1 + 2 * (not kept)) * rows * step.shape.dim + _weighted_rows(step, block)
        inside += 0 if kept else rows * block.inside("experts")
        return inside + 2 * width / tp + _dequantised(step, block)
    inside = e * t * block.inside("mlp") / tp
    at_product = (0 if kept else 3 * inside) + width
    # The gathered input, the last matrix's share of the sum, and its copy in the order of the
    # scatter.
    at_scatter = (0 if kept else inside) + 3 * width if tp > 1 else 0.0
    return max(at_product, at_scatter) + 2 * width / tp + _dequantised(step, block)


def _weighted_rows(step: StepConfig, block: Block) -> float:
    """The experts' outputs times the router's weights, which may be in fp32."""
    number_bytes = FP32 if block.wide_router else step.element_bytes
    return number_bytes * expert_rows(step, block) * step.shape.dim


def backward_working(step: StepConfig, block: Block) -> float:
    """A layer's MLP in backward: the gradients of the product and of what comes before it.

    Of experts: the gradient of their outputs in both orders and weighted, then inside.
    """
    e, tp, t, d = step.element_bytes, step.layout.tensor_parallel, step.tokens, step.shape.dim
    entry = e * t * d / tp
    if block.experts:
        rows, width = e * received_rows(step, block), block.inside("experts")
        outputs = 2 * _weighted_rows(step, block) + (rows * d if block.wide_router else 0)
        inside = rows * (2 * d + width) + _dequantised(step, block)
        return max(outputs, inside) + 2 * entry
    inside = e * t * block.inside("mlp") / tp
    # Of the last matrix: the gradient of its input beside the dequantised matrix, or beside the
    # adapter's part; under tensor parallelism the sum over the ranks is there whole. The others
    # come when what was kept of gate and up is gone.
    beside = _dequantised(step, block) + (2 * e * t * d if tp > 1 else 0.0)
    return max(2 * inside, inside + beside) + 2 * entry


def first_gradients(step: StepConfig, block: Block) -> float:
    """The part of a layer's gradients that are there while its MLP is worked on: the last matrix's.

    Of experts: of both matrices, as the second one's gradient waits for the first one's.
    """
    if not step.is_full:
        return 1.0
    last = block.experts or [matrix for _, matrix in block.of("mlp", "row")]
    return sum(matrix.parameters for matrix in last) / block.parameters
