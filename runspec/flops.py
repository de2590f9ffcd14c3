"""Model FLOPs of a training step, and how much of a GPU they use: MFU and HFU.

The convention is the one of PaLM (arXiv 2204.02311, appendix B): the matrix products that the
gradient needs, whatever the implementation does beside. A product with a weight of n numbers
takes 2n per token forward, 2n for the gradient of its input if one is needed, and 2n for the
gradient of the weight if it is trained; so 6n in full fine-tuning, and about 4n for LoRA's frozen
base. Not counted: looking up embeddings, recomputation by activation checkpointing, norms,
softmax, the optimizer. Unlike PaLM's formula, attention counts only the keys that a query may see
(causal, each document alone), and the output layer only trained positions; padding counts
nowhere.

MFU (model FLOP utilisation) is these FLOPs over time and the GPUs' peak. HFU (hardware FLOP
utilisation) counts what activation checkpointing computes again, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


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
    """Scores and their product with the values.

    width: of all query heads together; where values have another, the mean of both. window: keys
    that a query sees at most; None: all before it.
    """

    width: float
    window: int | None = None


@dataclass(frozen=True)
class Recurrence:
    """Linear attention by the delta rule; state: numbers of all heads' states together.

    Three products with the state per token: what a key reads of it, its update, and the output.
    Chunks of tokens compute the same with other products.
    """

    state: float


# Linear layers that read the same input, or attention, in the order of a forward pass.
Stage = Sequence[Linear] | Attention | Recurrence


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs per token, per trained position and per query-key pair.

    windowed: per pair in the layers with a window; `window` is theirs.
    """

    token: float
    target: float
    pair: float
    windowed: float = 0.0
    window: int | None = None

    def of(self, tokens: float, targets: float, lengths: Iterable[int] = ()) -> float:
        """FLOPs of a step over all ranks.

        Args:
            tokens: real tokens, no padding.
            targets: positions with a label that is trained.
            lengths: tokens of each document.
        """
        return tokens * self.token + targets * self.target + self.attention(lengths)

    def attention(self, lengths: Iterable[int]) -> float:
        """FLOPs of the query-key pairs of documents of these lengths."""
        return sum(
            self.pair * pairs(length) + self.windowed * pairs(length, self.window)
            for length in lengths
        )

    def __add__(self, other: ModelFlops) -> ModelFlops:
        return ModelFlops(
            self.token + other.token,
            self.target + other.target,
            self.pair + other.pair,
            self.windowed + other.windowed,
            self.window or other.window,
        )

    def __rmul__(self, times: int) -> ModelFlops:
        return ModelFlops(
            times * self.token,
            times * self.target,
            times * self.pair,
            times * self.windowed,
            self.window,
        )


def pairs(length: int, window: int | None = None) -> int:
    """Query-key pairs of a document of `length` tokens if a query sees `window` keys at most."""
    seen = length if window is None else min(window, length)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def count(
    stages: Iterable[Stage], output: Linear, *, trained_before: bool, backward: bool = True
) -> ModelFlops:
    """Count forward and backward, or forward alone.

    Args:
        stages: of all blocks, in order.
        trained_before: whether the embedding is trained. Gradients flow back no further than to
            the first trained parameter.
    """
    token = pair = windowed = 0.0
    window = None
    flows = trained_before
    for stage in stages:
        passes = 1 + 2 * flows * backward
        if isinstance(stage, Recurrence):
            token += 6 * stage.state * passes
            continue
        if isinstance(stage, Attention):
            if stage.window is None:
                pair += 4 * stage.width * passes
            else:
                windowed += 4 * stage.width * passes
                window = stage.window
            continue
        token += sum(_products(linear, flows, backward) for linear in stage)
        flows = flows or any(linear.any_trained for linear in stage)
    return ModelFlops(token, _products(output, flows, backward), pair, windowed, window)


def _products(linear: Linear, flows: bool, backward: bool) -> float:
    a, b = linear.adapter
    if not backward:
        return 2 * (linear.weights + a + b)
    return 2 * linear.weights * (1 + flows + linear.trained) + 2 * a * (2 + flows) + 2 * b * 3


def tflops_per_gpu(flops: float, seconds: float, gpus: int) -> float:
    """10^12 FLOPs per second and GPU."""
    return flops / seconds / gpus / 1e12
