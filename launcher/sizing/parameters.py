"""The parameters of a step on one rank, after tensor parallelism, by FSDP unit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from launcher.sizing.step_config import NF4_BYTES, StepConfig
from runspec.shape import Matrix


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

    @property
    def largest_trained(self) -> float:
        """Numbers of the largest parameter that is trained."""
        return max((p.rows * p.width for p in self.parameters if p.trained), default=0.0)

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
    norm = Unit((_norm(step),))
    # As the trainer decides: a tied table is needed twice, and an output layer that gives its
    # logits in parts, or none, stays with the root.
    apart = set() if step.shape.tied or not step.fsdp else set(step.apart)
    splits = "tok_embeddings" in apart
    ends = "output" in apart and step.loss == "plain"
    return Units(
        embedding=embedding if splits else Unit(),
        layer=Unit(tuple(_layer(step))),
        output=output if ends else Unit(),
        root=(Unit() if splits else embedding) + norm + (Unit() if ends else output),
    )


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
