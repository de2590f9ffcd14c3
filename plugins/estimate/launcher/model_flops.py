"""The model FLOPs of a step, counted for a model of a shape."""

from collections.abc import Mapping

from runspec import flops
from runspec.flops import ModelFlops
from runspec.shape import Block, Matrix, Shape


def of_shape(
    shape: Shape, full: bool, ranks: Mapping[str, int], backward: bool = True
) -> ModelFlops:
    """Count for a model of this shape.

    Args:
        full: every weight is trained; else LoRA's adapters alone.
        ranks: the adapters' rank by matrix of its blocks; "output" for the output layer.
        backward: False counts the forward pass alone.
    """

    def linear(name: str, matrix: Matrix) -> float:
        adapter = matrix.active * ranks.get(name, 0) * (matrix.inputs + matrix.outputs)
        return flops.linear(matrix.active_parameters, full, adapter, backward)

    total = ModelFlops(0.0, linear("output", shape.output), 0.0)
    for block, number in shape.blocks:
        own = ModelFlops(sum(linear(name, each) for name, each in block.matrices.items()), 0.0, 0.0)
        total += number * (own + _attention(block, backward))
    return total


def _attention(block: Block, backward: bool) -> ModelFlops:
    if block.attention is None:
        state = block.delta.state if block.delta else 0.0
        return ModelFlops(flops.recurrence(state, backward), 0.0, 0.0)
    width = (block.attention.query_width + block.attention.value_width) / 2
    return flops.attention(width, block.attention.window, backward)
