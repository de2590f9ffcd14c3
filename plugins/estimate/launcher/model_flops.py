"""The model FLOPs of a step, counted for a model of a shape."""

from collections.abc import Mapping

from runspec.flops import Attention, Linear, ModelFlops, Recurrence, Stage, count
from runspec.shape import Block, Matrix, Shape


def of_shape(
    shape: Shape, full: bool, ranks: Mapping[str, int], backward: bool = True
) -> ModelFlops:
    """Count for a model of this shape.

    Every layer is counted alike. In the first one LoRA needs no gradient of the input of q, k and
    v, so that this is up to 0.1 % more than `count` of a real model.

    Args:
        full: every weight is trained; else LoRA's adapters alone.
        ranks: the adapters' rank by matrix of its blocks; "output" for the output layer.
        backward: False counts the forward pass alone.
    """

    def linear(name: str, matrix: Matrix) -> Linear:
        rank = matrix.active * ranks.get(name, 0)
        adapter = rank * matrix.inputs, rank * matrix.outputs
        return Linear(matrix.active_parameters, full, adapter)

    output = linear("output", shape.output)
    flops = count((), output, trained_before=True, backward=backward)
    for block, number in shape.blocks:
        layers = [linear(name, matrix) for name, matrix in block.matrices.items()]
        stages = [layers, _attention(block)]
        nothing = Linear(0.0, False)
        flops += number * count(stages, nothing, trained_before=True, backward=backward)
    return flops


def _attention(block: Block) -> Stage:
    if block.attention is None:
        return Recurrence(block.delta.state) if block.delta else ()
    width = (block.attention.query_width + block.attention.value_width) / 2
    return Attention(width, block.attention.window)
