"""The tensors of a step on one rank: parameters, and what forward keeps for backward.

Parameters are after tensor parallelism, by FSDP unit. Symbols as in `launcher.sizing.memory`.
Sources: saved activations in the manner of Korthikanti et al. 2022 (arXiv 2205.05198) section 4,
with flash attention (Dao 2023, arXiv 2307.08691).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from launcher.sizing.step_config import FP32, NF4_BYTES, StepConfig
from runspec.shape import ATTENTION, MLP, Matrix


class Parameter(NamedTuple):
    """One parameter, before FSDP shards it by its rows.

    width: numbers in a row. row_bytes: of a row as it is gathered. trained: it has a gradient.
    shared: each tensor-parallel rank has a share of its gradient.
    """

    rows: float
    width: float
    row_bytes: float
    trained: bool
    shared: bool = False


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP gathers and reduces together."""

    parameters: tuple[Parameter, ...] = ()

    @property
    def gathered(self) -> float:
        """Bytes of the whole unit, in the dtype of the computation."""
        return sum(p.rows * p.row_bytes for p in self.parameters)

    @property
    def trained(self) -> float:
        """Numbers that are trained."""
        return sum(p.rows * p.width for p in self.parameters if p.trained)

    def stored(self, weight_bytes: int) -> float:
        """Bytes as stored, if a trained number takes weight_bytes."""
        frozen = sum(p.rows * p.row_bytes for p in self.parameters if not p.trained)
        return frozen + self.trained * weight_bytes

    def __add__(self, other: Unit) -> Unit:
        return Unit(self.parameters + other.parameters)


class Units(NamedTuple):
    """The FSDP units of a model: embedding, one layer, output layer, and the root with the rest.

    An embedding and an output layer that are no units of their own are empty here, and in the
    root.
    """

    embedding: Unit
    layer: Unit
    output: Unit
    root: Unit


def units_of(step: StepConfig) -> Units:
    """Return the FSDP units of a step's model."""
    embedding, output = Unit((_table(step),)), Unit(tuple(_output(step)))
    root = Unit((_norm(step),))
    # As the trainer decides: a tied table is needed twice, and an output layer that gives its
    # logits in parts, or none, stays with the root.
    apart = set() if step.shape.tied or not step.fsdp else set(step.apart)
    if "tok_embeddings" not in apart:
        embedding, root = Unit(), embedding + root
    if "output" not in apart or step.loss != "plain":
        output, root = Unit(), root + output
    return Units(embedding, Unit(tuple(_layer(step))), output, root)


def _layer(step: StepConfig) -> Iterator[Parameter]:
    shape, e, full = step.shape, step.element_bytes, step.is_full
    for name, matrix in shape.matrices.items():
        rows, width = _split(step, matrix)
        yield Parameter(rows, width, width * (NF4_BYTES if step.is_quantised else e), full)
        if name in shape.bias:
            yield Parameter(rows, 1, e, full)
        if name in step.lora_targets:
            yield from _adapter(step, matrix)
    for _ in range(shape.norms):
        yield _norm(step)
    if shape.head_norms:
        yield Parameter(shape.head_norms, 1, e, full, shared=True)


def _split(step: StepConfig, matrix: Matrix) -> tuple[float, float]:
    """Outputs and inputs of a matrix on one tensor-parallel rank."""
    tp, by_row = step.layout.tensor_parallel, matrix.role == "row"
    return matrix.outputs / (1 if by_row else tp), matrix.inputs / (tp if by_row else 1)


def _norm(step: StepConfig) -> Parameter:
    return Parameter(step.shape.dim, 1, step.element_bytes, step.is_full, shared=True)


def _adapter(step: StepConfig, matrix: Matrix) -> Iterator[Parameter]:
    """LoRA's A [rank, inputs] and B [outputs, rank], and DoRA's magnitude [outputs]."""
    e, rank, by_row = step.element_bytes, step.lora_rank, matrix.role == "row"
    rows, width = _split(step, matrix)
    yield Parameter(rank, width, width * e, True, shared=not by_row)
    yield Parameter(rows, rank, rank * e, True, shared=by_row)
    if step.is_dora:
        yield Parameter(rows, 1, e, True, shared=by_row)


def _table(step: StepConfig) -> Parameter:
    rows, dim = step.shape.vocab / step.layout.tensor_parallel, step.shape.dim
    return Parameter(rows, dim, dim * step.element_bytes, step.is_full)


def _output(step: StepConfig) -> Iterator[Parameter]:
    """The output layer; a tied one has no parameters of its own."""
    if not step.shape.tied:
        yield _table(step)
        if step.lora_output:
            yield from _adapter(step, step.shape.output)


# Activations -------------------------------------------------------------------------------------


def saved_by_layer(step: StepConfig) -> float:
    """Bytes that one layer keeps for backward without activation checkpointing.

    Norms compute in fp32: 4td for the input, 4td more for the normalised one if the scale is
    trained. A matrix keeps its input if it is trained or has an adapter: etd for q, k and v
    together and for gate and up together, nothing new for output_proj (attention's own output).
    Attention: e t (q + 2 kv + q) for queries, keys, values and the output; 4t per head for the
    log-sum. MLP: e t f each for the output of gate and of up, the activation, and their product
    if down_proj needs it. Tensor parallelism divides all but the gathered inputs. Compiled layers
    compute again what is made element by element: they keep a norm's input, etd, and no
    activation.
    """
    shape, e, tp = step.shape, step.element_bytes, step.layout.tensor_parallel
    t, d, f, q = step.tokens, shape.dim, shape.intermediate, shape.query_width
    norm = e if step.compiled else FP32 * 2 if step.is_full else FP32
    norms = shape.norms * norm * t * d / tp
    norms += norm * t * (q + shape.kv_width) / tp if shape.head_norms else 0
    inputs = sum(e * t * d for group in (ATTENTION[:3], MLP[:2]) if step.trains(*group))
    # Flash attention shares the heads of keys and values; in fp32 there is none: they are copied.
    kv = shape.kv_width if e < FP32 else q
    attention = (e * t * 2 * (q + kv) + FP32 * t * shape.heads) / tp
    if shape.fused:
        # The values that are kept are a part of the product, so that all of it stays.
        attention += e * t * (q + kv)
    mlp = e * t * f * (2 + step.trains("down_proj") + (not step.compiled)) / tp
    return norms + inputs + attention + mlp + _saved_by_adapters(step)


def _saved_by_adapters(step: StepConfig) -> float:
    t, e, tp = step.tokens, step.element_bytes, step.layout.tensor_parallel
    saved = 0.0
    for name in step.lora_targets:
        matrix = step.shape.matrices[name]
        saved += e * t * step.lora_rank
        if step.dropout:
            saved += (1 + e) * t * matrix.inputs / (tp if matrix.role == "row" else 1)
        if step.is_dora and not (step.compiled and name in MLP):
            # The sum that the magnitude scales; a matrix split by rows has a share of all of it.
            saved += e * t * matrix.outputs / (1 if matrix.role == "row" else tp)
    return saved


def recomputed_elements(step: StepConfig) -> float:
    """Bytes that one layer computes again, element by element, if products are kept ("op")."""
    return max(saved_by_layer(step) - _saved_products(step), 0.0)


def kept_by_layer(step: StepConfig) -> tuple[float, float]:
    """(bytes a layer keeps from forward to backward, bytes that backward computes again)."""
    whole, share = saved_by_layer(step), step.recomputed_share
    if step.checkpointing == "none":
        return whole, 0.0
    entry = step.element_bytes * step.tokens * step.shape.dim / step.layout.tensor_parallel
    entry = 0.0 if step.activation_offload else entry
    if step.checkpointing == "op":
        return entry + _saved_products(step), whole
    return entry * share + whole * (1 - share), whole


def _saved_products(step: StepConfig) -> float:
    """Selective checkpointing by operation: matrix products, attention and communication.

    One product per matrix and two per adapter; attention's output and log-sum; under tensor
    parallelism the two gathered inputs, the whole output of the matrices that are split by rows,
    and what of it is scattered.
    """
    shape, e, tp, t = step.shape, step.element_bytes, step.layout.tensor_parallel, step.tokens
    kept = e * t * shape.query_width / tp + FP32 * t * shape.heads / tp
    for name, matrix in shape.matrices.items():
        if step.compiled and name == "down_proj":
            continue  # nothing in the layer needs its result again
        width = matrix.outputs if matrix.role == "row" else matrix.outputs / tp
        kept += e * t * width
        if name in step.lora_targets:
            kept += e * t * (width + step.lora_rank)
    return kept + (e * t * shape.dim * (2 + 2 / tp) if tp > 1 else 0.0)


# Logits and loss --------------------------------------------------------------------------------


class LossMemory(NamedTuple):
    """Bytes of logits and loss: as logits are made, at the end of forward, in backward, and of
    what backward hands to the output layer.
    """

    made: float
    forward: float
    backward: float
    gradient: float


def linear_loss_rows(step: StepConfig) -> int:
    """Tokens at a time of the linear loss: as trainer.layers.loss chooses if no number is given.

    That is about as many logits as there are hidden numbers, and not less than 512 tokens'.
    """
    if step.chunks:
        return -(-step.tokens // step.chunks)
    columns = -(-step.shape.vocab // step.layout.tensor_parallel // step.shape.dim)
    return max(512, -(-step.tokens // columns))


def loss_memory(step: StepConfig) -> LossMemory:
    """Cross-entropy over t x V logits, split over the vocabulary by tensor parallelism.

    plain: the model turns its logits to fp32 (4tV), log-softmax keeps 4tV; backward holds that,
    the loss's gradient and log-softmax's. chunked: logits in e bytes, log-softmax in fp32, one
    chunk's temporaries; split over the vocabulary one more copy of a chunk. A soft cap makes its
    logits in fp32 itself, and backward keeps its tanh.
    """
    if step.loss == "linear":
        return _linear(step)
    e, tp, capped = step.element_bytes, step.layout.tensor_parallel, step.shape.softcap
    logits = step.tokens * step.shape.vocab / tp
    wide, more = FP32 * logits, 1 if tp > 1 else 0
    tanh = wide if capped else 0
    if step.loss == "plain":
        made = (e + FP32 if e < FP32 else e) * logits
        return LossMemory(made + tanh, (2 + more) * wide + tanh, (3 + more) * wide + tanh, made)
    narrow, part = e * logits, wide / step.chunks
    made, cast = (wide + tanh, 0.0) if capped else (narrow, part)
    forward = made + wide + cast + more * part
    return LossMemory(made, forward, wide + tanh + (2 + more) * part, narrow)


def _linear(step: StepConfig) -> LossMemory:
    """One chunk of logits in both dtypes, or its product with the hidden states on the way to the
    fp32 sum of a trained weight's gradient; the rows that are trained, and their gradient.
    """
    shape, e, tp = step.shape, step.element_bytes, step.layout.tensor_parallel
    hidden, columns = e * step.tokens * shape.dim, shape.vocab / tp
    part = min(linear_loss_rows(step), step.tokens) * columns
    # In fp32, and in bf16 before it or the slope after it; a cap keeps its tanh.
    made = part * (FP32 + (FP32 if shape.softcap else 0) + (e if e < FP32 else 0))
    product = e * columns * shape.dim if step.is_full and e < FP32 else 0.0
    # The trained rows, their gradient, the layers' result, and the norm's if nothing keeps it.
    forward = (1 + 1 / tp + (not step.is_full)) * hidden + max(made, e * part + product)
    # The norm's backward pass is in fp32.
    backward = (1 + 6 / tp if step.is_full else 2 + 8 / tp) * hidden
    return LossMemory(hidden, forward, backward, 2 * hidden)
