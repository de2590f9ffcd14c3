"""What the trainer does in a step and sizing counts: defaults that follow from others, and sums."""

from collections.abc import Mapping
from typing import Any, NamedTuple

# Fewer tokens in a chunk would leave a GPU idle between the linear loss's small matrix products.
MIN_LOSS_TOKENS = 512
# Each chunk adds to the gradient of a trained output head, in fp32: fewer chunks move less memory.
MAX_LOSS_TOKENS = 2048


class StepSums(NamedTuple):
    """What the training loop sums over all ranks in each step, in float64 over the CPU.

    targets, tokens, flops: of the data. The others count ranks: that see a
    request to stop, too many steps that are not finite, a checkpoint that failed or that another
    run has taken over, and a checkpoint that is due.
    """

    targets: float
    tokens: float
    flops: float
    stop: float
    too_many: float
    failed: float
    lost: float
    due: float


def reduces_each(config: Mapping[str, Any]) -> bool:
    """Whether gradients are reduced after every micro-step.

    If they are not, each GPU keeps a whole replica's gradients, which offloading is to save.
    """
    each = config.get("sync_each_micro_batch")
    return bool(config.get("fsdp_cpu_offload") if each is None else each)


def loss_tokens(
    tokens: int, vocabulary: int, dim: int, chunks: int | None, trains_head: bool
) -> int:
    """Return how many tokens the linear loss computes together.

    Args:
        vocabulary: this rank's part of it.
        chunks: in how many parts the tokens are computed; None or 0 makes about as many logits in
            one as there are hidden numbers, and not less than those of MIN_LOSS_TOKENS. If
            trains_head, also not less than fit, in fp32, into the memory of one more product of the
            head's size in bf16, which adding to its gradient may take, up to MAX_LOSS_TOKENS.
    """
    if chunks:
        return max(1, -(-tokens // chunks))
    fitting = min(MAX_LOSS_TOKENS, dim // 2) if trains_head else 0
    return max(MIN_LOSS_TOKENS, fitting, -(-tokens // -(-vocabulary // dim)))
