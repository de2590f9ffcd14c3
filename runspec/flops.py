"""Model FLOPs of a training step, and how much of a GPU they use: MFU and HFU.

The convention is the one of PaLM (arXiv 2204.02311, appendix B): the matrix products that the
gradient needs, whatever the implementation does beside. A product with a weight of n numbers
takes 2n per token forward, 2n for the gradient of its input if one is needed, and 2n for the
gradient of the weight if it is trained; so 6n in full fine-tuning, and about 4n for LoRA's frozen
base. Not counted: looking up embeddings, recomputation by activation checkpointing, norms,
softmax, the optimizer. Unlike PaLM's formula, attention counts only the keys that a query may see
(causal, each document by itself), and the output layer only trained positions; padding counts
nowhere.

MFU (model FLOP utilisation) is these FLOPs over time and the GPUs' peak. HFU (hardware FLOP
utilisation) counts what activation checkpointing computes again, too.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from runspec.shape import ATTENTION, Shape


@dataclass(frozen=True)
class Linear:
    """The numbers that one token is multiplied with in a linear layer, and which are trained.

    adapter: numbers of LoRA's A and B, both trained. A norm has no weights that count.
    """

    weights: float
    trained: bool
    adapter: tuple[float, float] = (0.0, 0.0)

    @property
    def any_trained(self) -> bool:
        """Whether gradients must flow back to it."""
        return self.trained or sum(self.adapter) > 0


@dataclass(frozen=True)
class Attention:
    """Scores and their product with the values; width: of all query heads together."""

    width: float


# Linear layers that read the same input, or attention, in the order of a forward pass.
Stage = Sequence[Linear] | Attention


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs per token, per trained position and per query-key pair."""

    token: float
    target: float
    pair: float

    def of(self, tokens: float, targets: float, pairs: float) -> float:
        """FLOPs of a step over all ranks.

        Args:
            tokens: real tokens, no padding.
            targets: positions with a label that is trained.
            pairs: query-key pairs; a document of n tokens has n(n + 1)/2.
        """
        return tokens * self.token + targets * self.target + pairs * self.pair


def count(
    stages: Iterable[Stage], output: Linear, *, trained_before: bool, backward: bool = True
) -> ModelFlops:
    """Count forward and backward, or forward alone.

    Args:
        stages: of all blocks, in order.
        trained_before: whether the embedding is trained. Gradients flow back no further than to
            the first trained parameter.
    """
    token = pair = 0.0
    flows = trained_before
    for stage in stages:
        if isinstance(stage, Attention):
            pair += 4 * stage.width * (1 + 2 * flows * backward)
            continue
        token += sum(_products(linear, flows, backward) for linear in stage)
        flows = flows or any(linear.any_trained for linear in stage)
    return ModelFlops(token, _products(output, flows, backward), pair)


def _products(linear: Linear, flows: bool, backward: bool) -> float:
    a, b = linear.adapter
    if not backward:
        return 2 * (linear.weights + a + b)
    return 2 * linear.weights * (1 + flows + linear.trained) + 2 * a * (2 + flows) + 2 * b * 3


def of_shape(
    shape: Shape, full: bool, ranks: Mapping[str, int], backward: bool = True
) -> ModelFlops:
    """Count for a model of this shape.

    Every layer is counted alike. In the first one LoRA needs no gradient of the input of q, k and
    v, so that this is up to 0.1 % more than `count` of a real model.

    Args:
        full: every weight is trained; else LoRA's adapters alone.
        ranks: the adapters' rank by matrix of `shape`; "output" for the output layer.
        backward: False counts the forward pass alone.
    """

    def linear(name: str) -> Linear:
        matrix = shape.output if name == "output" else shape.matrices[name]
        rank = matrix.active * ranks.get(name, 0)
        return Linear(matrix.active_parameters, full, (rank * matrix.inputs, rank * matrix.outputs))

    def block() -> Iterator[Stage]:
        names = [name for name in shape.matrices if name not in ATTENTION]
        yield [linear(name) for name in ATTENTION[:3]]
        yield Attention(shape.query_width)
        yield [linear(ATTENTION[3])]
        yield [linear(name) for name in names if not name.endswith("down_proj")]
        yield [linear(name) for name in names if name.endswith("down_proj")]

    found = count(block(), linear("output"), trained_before=True, backward=backward)
    layers = shape.layers
    return ModelFlops(layers * found.token, found.target, layers * found.pair)


def tflops_per_gpu(flops: float, seconds: float, gpus: int) -> float:
    """10^12 FLOPs per second and GPU."""
    return flops / seconds / gpus / 1e12


def utilisation(flops: float, seconds: float, gpus: int, peak_tflops: float) -> float:
    """MFU of a step's model FLOPs; HFU of these and what is computed again."""
    return tflops_per_gpu(flops, seconds, gpus) / peak_tflops
