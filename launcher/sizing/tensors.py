"""The tensors of a step on one rank: parameters, and what logits and loss take.

Parameters are after tensor and expert parallelism, by FSDP unit. Symbols as in
`launcher.sizing.memory`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from launcher.sizing.step_config import FP32, NF4_BYTES, StepConfig
from runspec.shape import Block, Matrix, Vector


class Parameter(NamedTuple):
    """One parameter, before FSDP shards it by its rows.

    width: numbers in a row. row_bytes: of a row as it is gathered. trained: it has a gradient.
    shared: each tensor-parallel rank has a share of its gradient. inner: if a row is a matrix, its
    sizes, by which FSDP can shard, too.
    """

    rows: float
    width: float
    row_bytes: float
    trained: bool
    shared: bool = False
    inner: tuple[int, ...] = ()


# Neither compared nor shown: what is not generated takes no time at each start.
@dataclass(frozen=True, eq=False, repr=False)
class Unit:
    """Parameters that FSDP gathers and reduces together; shards: the ranks that it shards over."""

    parameters: tuple[Parameter, ...] = ()
    shards: int = 1

    @property
    def gathered(self) -> float:
        """Bytes of the whole unit, in the dtype of the computation, rows filled up included."""
        return sum(self.padded(p) * p.row_bytes for p in self.parameters)

    @property
    def trained(self) -> float:
        """Numbers that are trained."""
        return sum(p.rows * p.width for p in self.parameters if p.trained)

    @property
    def reduced(self) -> float:
        """Numbers of what the collective reduces, filled up."""
        return sum(self.padded(p) * p.width for p in self.parameters if p.trained)

    def padded(self, parameter: Parameter) -> float:
        """Rows of a parameter that FSDP shards: filled up to a multiple of its ranks.

        Not if it shards the matrices that the rows are.
        """
        if any(size % self.shards == 0 for size in parameter.inner):
            return parameter.rows
        return -(-parameter.rows // self.shards) * self.shards

    def stored(self, weight_bytes: int) -> float:
        """Bytes as stored by one rank, if a trained number takes weight_bytes."""
        found = 0.0
        for p in self.parameters:
            row = weight_bytes * p.width if p.trained else p.row_bytes
            found += self.padded(p) * row / self.shards
        return found

    @property
    def trained_here(self) -> float:
        """Numbers that are trained, of one rank's shards."""
        return self.reduced / self.shards

    def __add__(self, other: Unit) -> Unit:
        return Unit(self.parameters + other.parameters, self.shards)


@dataclass(frozen=True, eq=False, repr=False)
class BlockUnits:
    """The FSDP units of one kind of block, and how many blocks are of it.

    experts: spread over ranks, they are a unit of
    their own, which holds this rank's; else they are in `own`.
    """

    block: Block
    count: int
    own: Unit
    experts: Unit

    @property
    def gathered(self) -> float:
        """Bytes of a whole block."""
        return self.own.gathered + self.experts.gathered

    @property
    def trained(self) -> float:
        """Numbers of a whole block that are trained."""
        return self.own.trained + self.experts.trained

    @property
    def reduced(self) -> float:
        """Numbers of the buffers that a whole block's gradients are reduced in."""
        return self.own.reduced + self.experts.reduced

    @property
    def trained_here(self) -> float:
        """Numbers that are trained, of one rank's shards."""
        return self.own.trained_here + self.experts.trained_here

    def stored(self, weight_bytes: int) -> float:
        """Bytes as stored by one rank."""
        return self.own.stored(weight_bytes) + self.experts.stored(weight_bytes)


class Units(NamedTuple):
    """The FSDP units of a model: embedding, each kind of block, output, and the root with the rest.

    An embedding and an output layer that are no units of their own are empty here, and in the
    root.
    """

    embedding: Unit
    blocks: tuple[BlockUnits, ...]
    output: Unit
    root: Unit

    @property
    def ends(self) -> Unit:
        """What is in no block."""
        return self.root + self.embedding + self.output

    def all_blocks(self, what: str) -> float:
        """The sum over all blocks of one of a block's sizes."""
        return float(sum(block.count * getattr(block, what) for block in self.blocks))

    def most(self, what: str) -> float:
        """One of a block's sizes, of the kind that has most."""
        return float(max(getattr(block, what) for block in self.blocks))


def units_of(step: StepConfig) -> Units:
    """Return the FSDP units of a step's model."""
    shards = step.layout.shard
    embedding, output = Unit((_table(step),), shards), Unit(tuple(_output(step)), shards)
    root = Unit((_vector(step, Vector(step.shape.dim)),), shards)
    # As the trainer decides: a tied table is needed twice, and an output layer that gives its
    # logits in parts, or none, stays with the root.
    apart = set() if step.shape.tied or not step.fsdp else set(step.apart)
    if "tok_embeddings" not in apart:
        embedding, root = Unit(shards=shards), embedding + root
    if "output" not in apart or step.loss != "plain":
        output, root = Unit(shards=shards), root + output
    blocks = tuple(_block(step, *each) for each in step.shape.blocks)
    return Units(embedding, blocks, output, root)


def _block(step: StepConfig, block: Block, count: int) -> BlockUnits:
    own, spread = [_vector(step, vector) for vector in block.vectors], list[Parameter]()
    for name, matrix in block.matrices.items():
        apart = matrix.role == "expert" and step.layout.expert_parallel > 1
        (spread if apart else own).extend(_matrix(step, name, matrix))
    experts = Unit(tuple(spread), step.expert_shards)
    return BlockUnits(block, count, Unit(tuple(own), step.layout.shard), experts)


def _matrix(step: StepConfig, name: str, matrix: Matrix) -> Iterator[Parameter]:
    """A matrix with its bias and its adapter."""
    e, full, shared = step.element_bytes, step.is_full, step.partial_gradient(matrix)
    rows, width = _split(step, matrix)
    number_bytes = NF4_BYTES if step.is_quantised and matrix.part != "router" else e
    sizes = (matrix.outputs, matrix.inputs) if matrix.role == "expert" else ()
    yield Parameter(rows, width, width * number_bytes, full, shared, sizes)
    if matrix.bias:
        # Of experts each row holds one expert's.
        each = matrix.outputs if matrix.role == "expert" else 1
        # It is added to the sum of the ranks, on each rank's own tokens.
        yield Parameter(rows, each, each * e, full, shared or matrix.role == "row")
    if name in step.lora_targets:
        yield from _adapter(step, matrix)


def _vector(step: StepConfig, vector: Vector) -> Parameter:
    """What is no matrix; each tensor-parallel rank has all of it, or its heads' part."""
    rows = vector.rows / (step.layout.tensor_parallel if vector.split else 1)
    row_bytes = vector.width * step.element_bytes
    return Parameter(rows, vector.width, row_bytes, step.is_full, shared=not vector.split)


def _split(step: StepConfig, matrix: Matrix) -> tuple[float, float]:
    """Rows of a matrix on one rank, and the numbers in each; an expert is a row of its own."""
    if matrix.role == "expert":
        return matrix.count / step.layout.expert_parallel, matrix.inputs * matrix.outputs
    tp, by_row = step.split_of(matrix), matrix.role == "row"
    return matrix.outputs / (1 if by_row else tp), matrix.inputs / (tp if by_row else 1)


def _adapter(step: StepConfig, matrix: Matrix) -> Iterator[Parameter]:
    """LoRA's A [rank, inputs] and B [outputs, rank], and DoRA's magnitude [outputs]."""
    e, rank, by_row = step.element_bytes, step.lora_rank, matrix.role == "row"
    rows, width = _split(step, matrix)
    whole = step.partial_gradient(matrix)
    if matrix.role == "expert":
        for size in (matrix.inputs, matrix.outputs):
            numbers = rank * size
            yield Parameter(rows, numbers, numbers * e, True, whole, (size, rank))
        return
    yield Parameter(rank, width, width * e, True, shared=whole or not by_row)
    yield Parameter(rows, rank, rank * e, True, shared=whole or by_row)
    if step.is_dora:
        yield Parameter(rows, 1, e, True, shared=whole or by_row)


def _table(step: StepConfig) -> Parameter:
    rows, dim = step.shape.vocab / step.layout.tensor_parallel, step.shape.dim
    return Parameter(rows, dim, dim * step.element_bytes, step.is_full)


def _output(step: StepConfig) -> Iterator[Parameter]:
    """The output layer; a tied one has no parameters of its own."""
    if not step.shape.tied:
        yield _table(step)
        if step.lora_output:
            yield from _adapter(step, step.shape.output)


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
