"""What forward keeps for backward on one rank, and what backward works with.

Symbols as in `launcher.sizing.memory`; r rows of the experts, as every token has one for each
expert that it meets. Sources: saved activations in the manner of Korthikanti et al. 2022 (arXiv
2205.05198) section 4, with flash attention (Dao 2023, arXiv 2307.08691).

Each function is of one layer, in a step whose model has such layers alone: `StepConfig.of_block`.
"""

from __future__ import annotations

from launcher.sizing.step_config import FP32, StepConfig
from runspec.shape import ATTENTION, EXPERTS, MLP, SHARED, Experts, Latent, Linear

# Tokens that linear attention takes at a time: trainer.layers.delta.
CHUNK = 64
# Of a block with experts, what tensor parallelism leaves whole beside the shared experts.
BESIDE_EXPERTS = ("router", "shared_expert_gate")


def saved_by_layer(step: StepConfig) -> float:
    """Bytes that one layer keeps for backward without activation checkpointing.

    Norms compute in fp32: 4td for the input, and if the scale is trained the normalised one too, in
    fp32 or in the dtype of the computation. A matrix keeps its input if it is trained or has an
    adapter: etd for all that read a norm's output together, nothing new for output_proj
    (attention's own output). Tensor parallelism divides all but the gathered inputs. Compiled
    layers compute again what is made element by element: they keep a norm's input, etd.
    """
    shape, e, tp = step.shape, step.element_bytes, step.layout.tensor_parallel
    t, d = step.tokens, shape.dim
    saved = shape.norms * _norm_bytes(step) * t * d / tp
    if shape.linear:
        saved += _saved_by_linear_attention(step, shape.linear)
    elif shape.latent:
        saved += _saved_by_latent_attention(step, shape.latent)
    else:
        saved += _saved_by_attention(step)
    if shape.experts is None:
        saved += e * t * d * step.trains(*MLP[:2]) + _saved_by_mlp(step, shape.intermediate)
    else:
        saved += _saved_by_experts(step, shape.experts)
    return saved + _saved_by_adapters(step)


def _norm_bytes(step: StepConfig) -> float:
    """Bytes per number of a norm's input."""
    if step.compiled:
        return step.element_bytes
    scaled = FP32 if step.shape.wide_norms else step.element_bytes
    return FP32 + (scaled if step.is_full else 0)


def _saved_by_attention(step: StepConfig) -> float:
    """e t (q + 2 kv + q) for queries, keys, values and the output; 4t per head for the log-sum.

    A gate keeps itself, its sigmoid if nothing is compiled, and what it is multiplied with.
    """
    shape, e, tp, t = step.shape, step.element_bytes, step.layout.tensor_parallel, step.tokens
    q, kv = shape.query_width, shape.kv_width
    saved: float = e * t * shape.dim * step.trains(*ATTENTION[:3])
    saved += _norm_bytes(step) * t * (q + kv) / tp if shape.head_norms else 0
    # Flash attention shares the heads of keys and values; in fp32 there is none: they are copied.
    copied = kv if e < FP32 else q
    saved += (e * t * 2 * (q + copied) + FP32 * t * shape.heads) / tp
    if shape.fused:
        # The values that are kept are a part of the product, so that all of it stays.
        saved += e * t * (q + kv) / tp
    if shape.gated:
        saved += e * t * q * (1 + (not step.compiled) + step.trains("output_proj")) / tp
    return saved


def _saved_by_latent_attention(step: StepConfig, latent: Latent) -> float:
    """Besides attention's own: both latents before and behind their norms.

    Keys are made of two parts, and values are a part of a product, all of which stays. Tensor
    parallelism splits the heads, and leaves the latents whole.
    """
    shape, e, t, tp = step.shape, step.element_bytes, step.tokens, step.layout.tensor_parallel
    heads = shape.heads
    saved: float = e * t * shape.dim * step.trains("q_proj", "q_a_proj", "kv_a_proj_with_mqa")
    saved += _norm_bytes(step) * t * (latent.queries + latent.keys)
    saved += e * t * latent.queries * step.trains("q_b_proj")
    saved += e * t * latent.keys * step.trains("kv_b_proj")
    product = heads * (latent.plain + latent.value)
    if step.compiled:
        product = heads * latent.value
    split = e * t * (2 * shape.query_width + product + shape.value_width) + FP32 * t * heads
    return saved + split / tp


def _saved_by_linear_attention(step: StepConfig, linear: Linear) -> float:
    """The gated delta rule of trainer.layers.delta, in fp32 and chunk by chunk.

    The convolution's output, and if it is trained its input at each of its positions; queries and
    keys before their norm, normalised and decayed, keys times their rate, and those
    that read the state; values, the new ones, and what the state does not predict of them; five
    matrices of pairs in each chunk; every chunk's state; the gated norm's input, its gate and their
    product. Compiled layers keep one matrix of pairs less, the convolution's input once less, and
    of the gated norm its input only. Counted by hooks on the saved tensors of one layer.
    """
    shape, e, t, tp = step.shape, step.element_bytes, step.tokens, step.layout.tensor_parallel
    key, value = linear.value_heads * linear.key, linear.value_width
    inputs: float = e * t * shape.dim * step.trains(*(name for name, _ in linear.parts))
    convolved = 1 + (linear.kernel - step.compiled) * step.is_full
    saved: float = e * t * (convolved * linear.mixed + value)
    pairs = (5 - step.compiled) * CHUNK * linear.value_heads
    saved += FP32 * t * (8 * key + 3 * value + pairs)
    saved += FP32 * t / CHUNK * key * linear.value
    saved += t * value * (e if step.compiled else 3 * FP32 + e * step.is_full)
    saved += e * t * value * step.trains("out_proj")
    return inputs + saved / tp


def _saved_by_mlp(step: StepConfig, width: int, prefix: str = "") -> float:
    """e t f each for the output of gate and of up, for the activation, and for their product if
    down_proj needs it; compiled layers keep no activation."""
    split = step.layout.tensor_parallel
    kept = 2 + step.trains(f"{prefix}down_proj") + (not step.compiled)
    return step.element_bytes * step.tokens * width * kept / split


def expert_rows(step: StepConfig) -> float:
    """Rows that the experts of a rank take, if each expert has as many; 0 without experts."""
    experts = step.shape.experts
    active = experts.active if experts else 0
    return step.tokens / step.layout.tensor_parallel * active


def _saved_by_experts(step: StepConfig, experts: Experts) -> float:
    """The experts' inputs in their order, as a dense MLP's rows from there on, and their outputs.

    The outputs stay, as the router's weights are multiplied with them. Each row has two numbers of
    eight bytes that say where it came from. The router keeps its probabilities, and its input if it
    is trained, in fp32 if it computes so.
    """
    shape, e, tp = step.shape, step.element_bytes, step.layout.tensor_parallel
    rows, t = expert_rows(step), step.tokens / tp
    width, d = experts.intermediate, shape.dim
    # Experts with a bias cap their gate and have an activation of their own, of which compiled
    # layers keep one part instead of four. Experts that are spread over ranks are outside of what
    # is compiled, as is the exchange of rows.
    compiled = step.compiled and step.layout.expert_parallel == 1
    between = (1 if compiled else 4) if experts.bias else not compiled
    saved = e * rows * (d * step.trains(EXPERTS[0]) + d)
    saved += e * rows * width * (2 + between + step.trains(EXPERTS[1])) + 3 * 8 * rows
    saved += FP32 * t * experts.count
    shared = tuple(SHARED + name for name in MLP[:2])
    saved += e * t * d * step.trains("router", *shared)
    saved += FP32 * t * d * (experts.wide_router and step.is_full)
    if experts.shared:
        saved += _saved_by_mlp(step, experts.shared, SHARED)
    return saved


def _saved_by_adapters(step: StepConfig) -> float:
    t, e, kind = step.tokens, step.element_bytes, step.adapter
    if kind is None:
        return 0.0
    # Between the blocks a rank has its own part of the sequence.
    own = e * t / step.layout.tensor_parallel
    saved = sum(own * step.adapter_size(sizes) for sizes in kind.saved_of("block"))
    for name in step.lora_targets:
        matrix, tp = step.shape.matrices[name], step.split_of(name)
        if step.dropout and matrix.role != "expert":
            saved += (1 + e) * t * matrix.inputs / (tp if matrix.role == "row" else 1)
        for sizes in kind.saved_of("linear", matrix.role):
            if sizes != ("out",):
                rows = expert_rows(step) if matrix.role == "expert" else t * (not matrix.behind)
                saved += e * rows * step.adapter_size(sizes)
            elif not (step.compiled and name in MLP):
                # The sum that is scaled; a matrix split by rows has a share of all of it.
                saved += e * t * matrix.outputs / (1 if matrix.role == "row" else tp)
    return saved


def recomputed_elements(step: StepConfig) -> float:
    """Bytes that one layer computes again, element by element, if products are kept ("op")."""
    return max(saved_by_layer(step) - saved_products(step), 0.0)


def kept_by_layer(step: StepConfig, recomputed: bool) -> tuple[float, float]:
    """(bytes a layer keeps from forward to backward, bytes that backward computes again)."""
    whole = saved_by_layer(step)
    if not recomputed:
        return whole, 0.0
    entry = step.element_bytes * step.tokens * step.shape.dim / step.layout.tensor_parallel
    entry = 0.0 if step.activation_offload else entry
    if step.checkpointing == "op":
        return entry + saved_products(step), whole
    return entry, whole


def saved_products(step: StepConfig) -> float:
    """Selective checkpointing by operation: matrix products, attention and communication.

    One product per matrix and two per adapter; attention's output and log-sum; of linear attention
    both products of pairs, three that are as wide as the values, and each chunk's state; under
    tensor parallelism the gathered inputs of attention and MLP, the whole output of the matrices
    that are split by rows, and what of it is scattered; experts, and what stands beside them, work
    on the rank's own part of the sequence. Compiled layers keep only what they compute with again.
    """
    shape, e, tp, t = step.shape, step.element_bytes, step.layout.tensor_parallel, step.tokens
    kept = e * t * shape.value_width / tp + FP32 * t * shape.heads / tp
    # Where no norm is behind the MLP, no backward pass needs the MLP's result.
    ends = not shape.norms_behind
    if linear := shape.linear:
        pairs, states = 2 * CHUNK * linear.value_heads, linear.value_width * linear.key / CHUNK
        kept = FP32 * t * (pairs + 3 * linear.value_width + states) / tp
    for name, matrix in shape.matrices.items():
        split, is_row = step.split_of(name), matrix.role == "row"
        exchanged = split > 1 and (is_row or name in shape.fused_names)
        # Of these the layer needs nothing again, or only what other ranks have sent of it.
        if step.compiled and (exchanged or (ends and name == "down_proj")):
            continue
        width = matrix.outputs if is_row else matrix.outputs / split
        rows = expert_rows(step) if matrix.role == "expert" else t
        if name.startswith(SHARED) or name in BESIDE_EXPERTS:
            rows = t / tp
        kept += e * rows * width
        if name in step.lora_targets:
            kept += e * rows * (width + step.lora_rank)
    if tp == 1:
        return kept
    sent = e * t * sum(shape.fused_widths) / tp
    gathered = 1 if shape.experts else 2
    scattered = gathered - (step.compiled and ends and shape.experts is None)
    return kept + e * t * shape.dim * (gathered + scattered / tp) + sent


# What a layer works with --------------------------------------------------------------------------


def dequantised(step: StepConfig) -> float:
    """NF4: the largest matrix, in the compute dtype, while it is multiplied; experts together."""
    if not step.is_quantised:
        return 0.0
    found = 0.0
    for name, matrix in step.shape.matrices.items():
        split = step.layout.expert_parallel if matrix.role == "expert" else step.split_of(name)
        found = max(found, matrix.parameters / split)
    return step.element_bytes * found


def forward_working(step: StepConfig) -> float:
    """A layer's MLP in forward: gate, activation and product, the norm's output, the residual.

    Of experts: the rows as they are and in order, or the output in both orders.
    """
    shape, e, tp, t = step.shape, step.element_bytes, step.layout.tensor_parallel, step.tokens
    width, kept = e * t * shape.dim, step.checkpointing == "none"
    if shape.experts is not None:
        rows = e * expert_rows(step)
        inside = (1 + 2 * (not kept)) * rows * shape.dim + _weighted_rows(step, shape.experts)
        inside += 0 if kept else rows * shape.experts.intermediate
        return inside + 2 * width / tp + dequantised(step)
    inside = e * t * shape.intermediate / tp
    at_product = (0 if kept else 3 * inside) + width
    # The gathered input, down_proj's share of the sum, and its copy in the order of the scatter.
    at_scatter = (0 if kept else inside) + 3 * width if tp > 1 else 0.0
    return max(at_product, at_scatter) + 2 * width / tp + dequantised(step)


def _weighted_rows(step: StepConfig, experts: Experts) -> float:
    """The experts' outputs times the router's weights, which may be in fp32."""
    number_bytes = FP32 if experts.wide_router else step.element_bytes
    return number_bytes * expert_rows(step) * step.shape.dim


def backward_working(step: StepConfig) -> float:
    """A layer's MLP in backward: the gradients of the product and of what comes before it.

    Of experts: the gradient of their outputs in both orders and weighted, then inside.
    """
    shape, e, tp, t = step.shape, step.element_bytes, step.layout.tensor_parallel, step.tokens
    entry = e * t * shape.dim / tp
    if shape.experts is not None:
        rows, width = e * expert_rows(step), shape.experts.intermediate
        outputs = 2 * _weighted_rows(step, shape.experts)
        outputs += rows * shape.dim if shape.experts.wide_router else 0
        inside = rows * (2 * shape.dim + width) + dequantised(step)
        return max(outputs, inside) + 2 * entry
    working = 2 * e * t * shape.intermediate / tp + 2 * entry + dequantised(step)
    return working + (2 * e * t * shape.dim if tp > 1 else 0)


def first_gradients(step: StepConfig) -> float:
    """The part of a layer's gradients that are there while its MLP is worked on: the last matrix's.

    Of experts: of both matrices, as the second one's gradient waits for the first one's.
    """
    if not step.is_full:
        return 1.0
    shape = step.shape
    names = ("down_proj",) if shape.experts is None else EXPERTS
    return sum(shape.matrices[name].parameters for name in names) / shape.layer_parameters
