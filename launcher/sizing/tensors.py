"""The tensors of a step on one rank: parameters, and what logits and loss take.

Parameters are after tensor and expert parallelism, by FSDP unit. Symbols as in
`launcher.sizing.memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from launcher.sizing.step_config import FP32, StepConfig
from runspec.shape import Block, Matrix, Vector
from runspec.step import kept_bytes, loss_tokens


class Parameter(NamedTuple):
    """One parameter, before FSDP shards it by its rows.

    width: numbers in a row. row_bytes: of a row as it is gathered. trained: it has a gradient.
    shared: each tensor-parallel rank has a share of its gradient. inner: if a row is a matrix, its
    sizes, by which FSDP can shard, too. shards: the ranks that FSDP shards it over.
    """

    rows: float
    width: float
    row_bytes: float
    trained: bool
    shared: bool = False
    inner: tuple[int, ...] = ()
    shards: int = 1

    @property
    def padded(self) -> float:
        """Rows as FSDP shards them: filled up to a multiple of its ranks.

        Not if it shards the matrices that the rows are.
        """
        if any(size % self.shards == 0 for size in self.inner):
            return self.rows
        return -(-self.rows // self.shards) * self.shards


# Each block of a model asks for its kind's sizes.
@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP gathers and reduces together."""

    parameters: tuple[Parameter, ...] = ()

    @classmethod
    def over(cls, shards: int, parameters: Iterable[Parameter]) -> Unit:
        """Return a unit that FSDP shards over so many ranks."""
        return cls(tuple(parameter._replace(shards=shards) for parameter in parameters))

    @property
    def shards(self) -> int:
        """The ranks that it is sharded over."""
        return self.parameters[0].shards if self.parameters else 1

    @cached_property
    def gathered(self) -> float:
        """Bytes of the whole unit, in the dtype of the computation, rows filled up included."""
        return sum(p.padded * p.row_bytes for p in self.parameters)

    @cached_property
    def trained(self) -> float:
        """Numbers that are trained."""
        return sum(p.rows * p.width for p in self.parameters if p.trained)

    @cached_property
    def reduced(self) -> float:
        """Numbers of what the collective reduces, filled up."""
        return sum(p.padded * p.width for p in self.parameters if p.trained)

    @cached_property
    def trained_here(self) -> float:
        """Numbers that are trained, of one rank's shards."""
        return sum(p.padded * p.width / p.shards for p in self.parameters if p.trained)

    def stored(self, weight_bytes: int) -> float:
        """Bytes as stored by one rank, if a trained number takes weight_bytes."""
        size = 0.0
        for p in self.parameters:
            row = weight_bytes * p.width if p.trained else p.row_bytes
            size += p.padded * row / p.shards
        return size

    def __add__(self, other: Unit) -> Unit:
        return Unit(self.parameters + other.parameters)


class BlockUnits(NamedTuple):
    """The FSDP units of one kind of block, and the number of such blocks.

    experts: spread over ranks, they are a unit of their own, which holds this rank's; else they are
    in `own`. whole: both together.
    """

    block: Block
    number: int
    own: Unit
    experts: Unit
    whole: Unit


class Units(NamedTuple):
    """The FSDP units of a model: embedding, each kind of block, output, and the root with the rest.

    An embedding and an output layer that are no units of their own are empty here, and in the
    root. Root and output layer stay gathered from the forward pass to the end of the backward pass.
    """

    embedding: Unit
    blocks: tuple[BlockUnits, ...]
    output: Unit
    root: Unit

    @property
    def each(self) -> Iterator[tuple[Unit, int]]:
        """The units of the whole model and how many there are of each."""
        yield from ((self.root, 1), (self.embedding, 1), (self.output, 1))
        yield from ((each.whole, each.number) for each in self.blocks)

    def sum(self, size: Callable[[Unit], float]) -> float:
        """A size of a unit, over the whole model."""
        return sum(number * size(unit) for unit, number in self.each)

    @property
    def largest(self) -> float:
        """Bytes of the block that has most, gathered."""
        return max(each.whole.gathered for each in self.blocks)


def units_of(step: StepConfig) -> Units:
    """Return the FSDP units of a step's model."""
    shards = step.layout.shard
    embedding, output = (
        Unit.over(shards, _embedding(step)),
        Unit.over(shards, _output(step)),
    )
    root = Unit.over(shards, [_vector(step, Vector(step.shape.dim)), *_added(step, "model")])
    # As the trainer decides: a tied table is needed twice, and an output layer that gives its
    # logits in parts stays with the root.
    together = not step.fsdp or (step.shape.tied and step.loss != "score")
    if together:
        embedding, root = Unit(), embedding + root
    if together or (step.loss == "chunked" and step.chunks > 1):
        output, root = Unit(), root + output
    blocks = tuple(_block(step, *each) for each in step.shape.blocks)
    return Units(embedding, blocks, output, root)


def _block(step: StepConfig, block: Block, number: int) -> BlockUnits:
    own, spread = [_vector(step, vector) for vector in block.vectors], list[Parameter]()
    own += _added(step, "block", block)
    for name, matrix in block.matrices.items():
        apart = matrix.role == "expert" and step.layout.expert_parallel > 1
        (spread if apart else own).extend(_matrix(step, name, matrix))
    both = Unit.over(step.layout.shard, own), Unit.over(step.expert_shards, spread)
    return BlockUnits(block, number, *both, both[0] + both[1])


def _matrix(step: StepConfig, name: str, matrix: Matrix) -> Iterator[Parameter]:
    """A matrix with its bias and its adapter."""
    e, full, shared = step.element_bytes, step.is_full, step.partial_gradient(matrix)
    rows, width = _split(step, matrix)
    number_bytes = step.packed_bytes if step.is_quantised and matrix.part != "router" else e
    sizes = (matrix.outputs, matrix.inputs) if matrix.role == "expert" else ()
    yield Parameter(rows, width, width * number_bytes, full, shared, sizes)
    if matrix.bias:
        # Of experts each row holds one expert's.
        each = matrix.outputs if matrix.role == "expert" else 1
        # It is added to the sum of the ranks, on each rank's own tokens.
        yield Parameter(rows, each, each * e, full, shared or matrix.role == "row")
    if name in step.lora_targets:
        yield from _adapter(step, name, matrix)


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


def _adapter(step: StepConfig, name: str, matrix: Matrix) -> Iterator[Parameter]:
    """What the kind of adapter adds to a matrix."""
    e, along = step.element_bytes, "in" if matrix.role == "row" else "out"
    rows, width = _split(step, matrix)
    whole = step.partial_gradient(matrix)
    if matrix.role == "expert":
        for size in (matrix.inputs, matrix.outputs):
            numbers = step.rank_of(name) * size
            yield Parameter(rows, numbers, numbers * e, True, whole, (size, step.rank_of(name)))
        return
    for sizes in step.adapter.parts_of(*matrix.owners).values() if step.adapter else ():
        known = {"in": width, "out": rows, "lora_rank": step.rank_of(name)}
        first, inner = (step.adapter_size(part, known) for part in (sizes[:1], sizes[1:]))
        yield Parameter(first, inner, inner * e, True, whole or along not in sizes)


def _added(step: StepConfig, owner: str, block: Block | None = None) -> Iterator[Parameter]:
    """What the kind of adapter adds to a block, or to the model."""
    tp = step.layout.tensor_parallel
    for sizes in step.adapter.parts_of(owner).values() if step.adapter else ():
        # Keys and values are split by heads.
        parts = (step.adapter_size((n,), {}, block) / (tp if n == "kv" else 1) for n in sizes[1:])
        rows, width = step.adapter_size(sizes[:1], {}, block), prod(parts)
        yield Parameter(rows, width, width * step.element_bytes, True, shared="kv" not in sizes)


def _table(step: StepConfig, name: str) -> Parameter:
    rows, dim = step.shape.vocab / step.layout.tensor_parallel, step.shape.dim
    return Parameter(rows, dim, dim * step.element_bytes, step.trains_table(name))


def _embedding(step: StepConfig) -> Iterator[Parameter]:
    yield _table(step, "tok_embeddings")


def _output(step: StepConfig) -> Iterator[Parameter]:
    """The output layer; a tied one has no parameters of its own."""
    if not step.shape.tied:
        yield _table(step, "output")
        if step.lora_output:
            yield from _adapter(step, "output", step.shape.output)


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
    """Tokens at a time of the linear loss."""
    columns = -(-step.shape.vocab // step.layout.tensor_parallel)
    return loss_tokens(step.tokens, columns, step.shape.dim, step.chunks)


def loss_memory(step: StepConfig) -> LossMemory:
    """Cross-entropy over t x V logits, split over the vocabulary by tensor parallelism.

    plain: the model turns its logits to fp32 (4tV), log-softmax keeps 4tV; backward holds that,
    the loss's gradient and log-softmax's. chunked: logits in e bytes, log-softmax in fp32, one
    chunk's temporaries; split over the vocabulary one more copy of a chunk. A soft cap makes its
    logits in fp32 itself, and backward keeps its tanh.
    """
    if step.loss == "score":
        return _score(step)
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
    # In fp32, and in bf16 before it or the slope after it; a cap keeps its tanh. Compiled, if the
    # vocabulary is whole: the logits and the slope.
    made = part * (FP32 + (FP32 if shape.softcap else 0) + (e if e < FP32 else 0))
    if step.compiled and tp == 1:
        made = part * 2 * e
    if step.teacher_logits:
        # In fp32 the logits of both, the slope, and what it is made of.
        made = part * FP32 * (5 if shape.softcap else 4)
    product = e * columns * shape.dim if step.trains_table("output") and e < FP32 else 0.0
    # The trained rows, their gradient, the layers' result, and the norm's if nothing keeps it.
    forward = (1 + 1 / tp + (not step.is_full)) * hidden + max(made, e * part + product)
    # The norm's backward pass is in fp32.
    wide = FP32 / e / tp
    backward = (1 + 3 * wide if step.is_full else 2 + 4 * wide) * hidden
    return LossMemory(hidden, forward, backward, 2 * hidden)


# As trainer.objectives.teach: of so many tokens all logits are compared.
COMPARED_TOKENS = 128


def top_k_memory(step: StepConfig) -> float:
    """Top k and tail of all tokens, one chunk of logits; or the logits that are compared.

    These are whole on each rank: the teacher's, the student's, and what is made of both.
    """
    shape, e = step.shape, step.element_bytes
    part = min(linear_loss_rows(step), step.tokens) * shape.vocab / step.layout.tensor_parallel
    chunk = part * (FP32 + (FP32 if shape.softcap else 0) + (e if e < FP32 else 0))
    compared = 4 * FP32 * min(COMPARED_TOKENS, step.tokens) * shape.vocab
    # The last hidden states, after the norm, and of the trained tokens.
    hidden = 3 * e * step.tokens * shape.dim
    return hidden + step.tokens * kept_bytes(step.top_k) + max(chunk, compared)


def _score(step: StepConfig) -> LossMemory:
    """The last norm of all positions, of which a score head reads one for each document."""
    hidden = step.element_bytes * step.tokens * step.shape.dim
    # The norm's backward pass is in fp32.
    norm = (1 + 3 * FP32 / step.element_bytes / step.layout.tensor_parallel) * hidden
    return LossMemory(hidden, hidden, norm, 2 * hidden)
