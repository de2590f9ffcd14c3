"""Advantages of groups of answers, and the losses of policy optimisation, as formulas.

Sources: GRPO (arXiv 2402.03300), Dr. GRPO (2503.20783), DAPO (2503.14476), GSPO (2507.18071),
truncated importance sampling (fengyao.notion.site/off-policy-rl). The values are those of TRL 1.16:
tests/plugins/rl/trl_rl.json.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from trainer.layers.batch import MicroBatch
from trainer.layers.log_probs import document_sums

# As TRL's, added to a standard deviation.
STD_EPSILON = 1e-4


class LogProbs(NamedTuple):
    """Log-probabilities of the trained tokens of a batch, fp32 [target_count] each."""

    # With a graph behind it.
    policy: torch.Tensor
    # Of the policy before the first update on these answers; None if this is that one.
    old: torch.Tensor | None = None
    # As the sampler had them.
    sampled: torch.Tensor | None = None
    # Of the model before training, None without one.
    reference: torch.Tensor | None = None


@dataclass(frozen=True)
class Rule:
    """How a loss is made of log-probabilities and advantages; see plugins.rl.recipe_keys."""

    loss: str
    low: float
    high: float
    beta: float = 0.0
    cap: float | None = None
    longest: int = 1

    @property
    def over_tokens(self) -> bool:
        """Whether the loss is a mean over tokens, else over answers."""
        return self.loss == "dapo"


def advantages(rewards: torch.Tensor, scale: bool) -> torch.Tensor:
    """The advantage of each answer, [groups, group_size], in the dtype of `rewards`.

    Args:
        rewards: NaN for an answer that has none: it counts in no mean, and its advantage is 0. So
            is that of one that is alone in its group.
    """
    has = ~rewards.isnan()
    count = has.sum(1, keepdim=True)
    known = rewards.nan_to_num()
    mean = known.sum(1, keepdim=True) / count.clamp_min(1)
    result = torch.where(has & (count > 1), known - mean, torch.zeros_like(known))
    if not scale:
        return result
    squares = torch.where(has, (known - mean).square(), torch.zeros_like(known))
    std = (squares.sum(1, keepdim=True) / (count - 1).clamp_min(1)).sqrt()
    return result / (std + STD_EPSILON)


def without_variance(rewards: torch.Tensor) -> torch.Tensor:
    """Which groups teach nothing, bool [groups]: all rewards that are there are about equal."""
    highest = rewards.nan_to_num(nan=-torch.inf).amax(1)
    lowest = rewards.nan_to_num(nan=torch.inf).amin(1)
    return ~(highest - lowest > 1e-6)


def overlong(lengths: torch.Tensor, longest: int, buffer: int) -> torch.Tensor:
    """DAPO's soft punishment of answers of such lengths: 0, then falling to -1 at `longest`."""
    if not buffer:
        return torch.zeros_like(lengths, dtype=torch.float64)
    return -((lengths - (longest - buffer)).clamp(0, buffer) / buffer).double()


def kl_estimate(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Schulman's k3 of each token, an estimate of KL(policy | reference) that is never negative."""
    apart = reference - policy
    return apart.exp() - apart - 1


def policy_loss(
    logps: LogProbs, advantage: torch.Tensor, batch: MicroBatch, rule: Rule
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss summed over the batch's tokens or answers, see Rule.over_tokens, and its figures.

    Args:
        advantage: fp32 [documents].

    Returns:
        A scalar; and sums over the same targets, detached: entropy (estimated by minus the mean
        log-probability), clip/low and clip/high (shares that were clipped), kl to the reference,
        kl/sampler (to the sampler).
    """
    policy = logps.policy
    old = policy.detach() if logps.old is None else logps.old
    counts = document_sums(torch.ones_like(policy), batch).flatten().clamp_min(1)
    of_token = batch.document_index

    def by_answer(values: torch.Tensor) -> torch.Tensor:
        return document_sums(values, batch).flatten()

    def reduced(values: torch.Tensor) -> torch.Tensor:
        if rule.over_tokens:
            return values.sum()
        return (by_answer(values) / (rule.longest if rule.loss == "dr_grpo" else counts)).sum()

    log_ratio, own = policy - old, advantage[of_token]
    if rule.loss == "gspo":
        log_ratio = (by_answer(log_ratio) / counts)[of_token]
    ratio = log_ratio.exp()
    loss = -torch.minimum(ratio * own, ratio.clamp(1 - rule.low, 1 + rule.high) * own)
    if rule.cap is not None and logps.sampled is not None:
        loss = loss * (old - logps.sampled).exp().clamp(max=rule.cap)
    kl = None if logps.reference is None else kl_estimate(policy, logps.reference)
    if kl is not None and rule.beta:
        loss = loss + rule.beta * kl
    figures = {
        "entropy": -policy,
        "clip/low": (ratio < 1 - rule.low) & (own < 0),
        "clip/high": (ratio > 1 + rule.high) & (own > 0),
    }
    if kl is not None:
        figures["kl"] = kl
    if logps.sampled is not None:
        figures["kl/sampler"] = kl_estimate(logps.sampled, old)
    summed = {}
    for name, values in figures.items():
        values = values.detach().float()
        summed[name] = values.sum() if rule.over_tokens else (by_answer(values) / counts).sum()
    return reduced(loss), summed
