"""Parameters on one rank, by FSDP unit, and what logits and loss take.

Symbols as in `plugins.estimate.launcher.memory`.
"""

from __future__ import annotations

from typing import NamedTuple

from plugins.estimate.launcher.step_config import FP32, NF4_BYTES, StepConfig
from runspec.shape import Block, Matrix
from runspec.step import loss_tokens


class Unit(NamedTuple):
    """Parameters that FSDP gathers and reduces together, after tensor and expert parallelism."""

    # Bytes of all of them, as they are computed with.
    gathered: float = 0.0
    # How many have a gradient.
    trained: float = 0.0
    # Bytes of the shards of one rank.
    stored: float = 0.0
    # Trained numbers of these shards.
    here: float = 0.0

    def plus(self, other: Unit) -> Unit:
        """The sum with another."""
        return Unit(*(a + b for a, b in zip(self, other, strict=True)))


class Units(NamedTuple):
    """The FSDP units of a model."""

    # Of each kind of block.
    kinds: tuple[Unit, ...]
    # Last norm and output layer, which stay gathered from the forward pass to the end.
    ends: Unit
    # Empty if the output layer's table is this, too.
    embedding: Unit
    # Of all blocks and both ends.
    whole: Unit


def units_of(step: StepConfig) -> Units:
    """Return the FSDP units of a step's model."""
    shape, none = step.shape, Unit()
    norm = _unit(step, shape.dim, step.is_full).plus(_added(step, "model"))
    embedding, head = _table(step, "tok_embeddings"), none if shape.tied else _table(step, "output")
    if step.loss == "score":
        head = _unit(step, shape.dim, True)
    elif shape.tied:
        # A tied table is needed twice.
        embedding, head = none, embedding
    kinds, ends = tuple(_block(step, block) for block in shape.kinds), norm.plus(head)
    whole = ends.plus(embedding)
    for kind in shape.order:
        whole = whole.plus(kinds[kind])
    return Units(kinds, ends, embedding, whole)


def _unit(
    step: StepConfig, numbers: float, trained: bool, each: float = 0.0, shards: int = 0
) -> Unit:
    """A number of elements of `each` bytes, or of the dtype of the computation."""
    gathered, shards = numbers * (each or step.element_bytes), shards or step.layout.shard
    if not trained:
        return Unit(gathered, 0.0, gathered / shards)
    return Unit(gathered, numbers, step.weight_bytes * numbers / shards, numbers / shards)


def _block(step: StepConfig, block: Block) -> Unit:
    unit, tp = _added(step, "block", block), step.layout.tensor_parallel
    for vector in block.vectors:
        numbers = vector.rows * vector.width / (tp if vector.split else 1)
        unit = unit.plus(_unit(step, numbers, step.is_full))
    for name, matrix in block.matrices.items():
        unit = unit.plus(_matrix(step, name, matrix))
    return unit


def _matrix(step: StepConfig, name: str, matrix: Matrix) -> Unit:
    """A matrix with its bias and its adapter."""
    expert = matrix.role == "expert"
    split, shards = step.split_of(matrix), step.expert_shards if expert else 0
    packed = step.is_quantised and matrix.part != "router"
    bytes_each = NF4_BYTES if packed else step.element_bytes
    unit = _unit(step, matrix.parameters / split, step.is_full, bytes_each, shards)
    if matrix.bias:
        numbers = matrix.count * matrix.outputs / split
        unit = unit.plus(_unit(step, numbers, step.is_full, shards=shards))
    if name in step.lora_targets:
        numbers = step.adapter_numbers(matrix, split)
        unit = unit.plus(_unit(step, numbers, True, shards=shards))
    return unit


def _added(step: StepConfig, owner: str, block: Block | None = None) -> Unit:
    """What the kind of adapter adds to a block, or to the model."""
    return _unit(step, step.numbers_of((owner,), {}, block), True)


def _table(step: StepConfig, name: str) -> Unit:
    """The embedding, or the output layer, with its adapter."""
    shape, tp = step.shape, step.layout.tensor_parallel
    unit = _unit(step, shape.vocab * shape.dim / tp, step.trains_table(name))
    return unit.plus(_unit(step, step.table_adapter(name) / tp, True))


# Logits and loss --------------------------------------------------------------------------------


def linear_loss_rows(step: StepConfig) -> int:
    """Tokens in a chunk of the linear loss."""
    columns = -(-step.shape.vocab // step.layout.tensor_parallel)
    trained = step.trains_table("output")
    rows = loss_tokens(step.tokens, columns, step.shape.dim, step.chunks, trained)
    return min(rows, step.tokens)


def loss_memory(step: StepConfig) -> tuple[float, float]:
    """Bytes of logits and loss at the end of the forward pass, and in the backward pass.

    Linear: the gradients are made in the forward pass. Score: the last hidden states alone.
    """
    e, tp = step.element_bytes, step.layout.tensor_parallel
    hidden = e * step.tokens * step.shape.dim
    # The last norm's backward pass is in fp32.
    norm = 3 * FP32 / e / tp * hidden
    if step.loss == "score":
        return hidden, hidden + norm
    return _linear(step, hidden), (1 if step.is_full else 2) * hidden + norm


def _logits_bytes(step: StepConfig) -> float:
    """Bytes of a logit in the making: in fp32, in bf16 before it. Compiled, if the vocabulary is
    whole: the logit and its slope. Of a teacher's, too: four in fp32.
    """
    e = step.element_bytes
    if step.teacher_logits:
        return FP32 * 4
    if step.compiled and step.layout.tensor_parallel == 1:
        return 2 * e
    return FP32 + (e if e < FP32 else 0)


def _linear(step: StepConfig, hidden: float) -> float:
    """The trained rows, their gradient and the layers' result; one chunk of logits, or the product
    with the hidden states on its way to the fp32 sum of a trained weight's gradient.
    """
    columns, tp = step.shape.vocab / step.layout.tensor_parallel, step.layout.tensor_parallel
    part, e = linear_loss_rows(step) * columns, step.element_bytes
    product = e * columns * step.shape.dim if step.trains_table("output") and e < FP32 else 0.0
    chunk = max(part * _logits_bytes(step), e * part + product)
    return (1 + 1 / tp + (not step.is_full)) * hidden + chunk
