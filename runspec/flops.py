"""Model FLOPs of a training step, and how much of a GPU they use: MFU and HFU.

The convention is the one of PaLM (arXiv 2204.02311, appendix B): the matrix products that the
gradient needs, whatever the implementation does beside. A product with a weight of n numbers
takes 2n per token forward, 2n for the gradient of its input if one is needed, and 2n for the
gradient of the weight if it is trained; so 6n in full fine-tuning, and about 4n for LoRA's frozen
base. Not counted: looking up embeddings, recomputation by activation checkpointing, norms,
softmax, the optimizer. Unlike PaLM's formula, attention counts only the keys that a query may see
(causal, each document alone), and the output layer only trained positions; padding counts
nowhere. Gradients flow back to the first block in which something is trained.

MFU (model FLOP utilisation) is these FLOPs over time and the GPUs' peak. HFU (hardware FLOP
utilisation) counts what activation checkpointing computes again, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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


def linear(weights: float, trained: bool, adapter: float = 0.0, backward: bool = True) -> float:
    """FLOPs per token of a linear layer.

    Args:
        weights: the numbers that one token is multiplied with.
        trained: whether they are.
        adapter: numbers of LoRA's A and B together, both trained.
        backward: False counts the forward pass alone.
    """
    return 2 * weights * (1 + backward * (1 + trained)) + 2 * adapter * (1 + 2 * backward)


def attention(width: float, window: int | None, backward: bool = True) -> ModelFlops:
    """Scores and their product with the values, of one layer.

    Args:
        width: of all query heads together; where values have another, the mean of both.
        window: keys that a query sees at most; None: all before it.
        backward: as `linear`.
    """
    pair = 4 * width * (1 + 2 * backward)
    if window is None:
        return ModelFlops(0.0, 0.0, pair)
    return ModelFlops(0.0, 0.0, 0.0, pair, window)


def recurrence(state: float, backward: bool = True) -> float:
    """FLOPs per token of linear attention by the delta rule.

    Three products with the state: what a key reads of it, its update, and the output. Chunks of
    tokens compute the same with other products.

    Args:
        state: numbers of all heads' states together.
        backward: as `linear`.
    """
    return 6 * state * (1 + 2 * backward)


def tflops_per_gpu(flops: float, seconds: float, gpus: int) -> float:
    """10^12 FLOPs per second and GPU."""
    return flops / seconds / gpus / 1e12
