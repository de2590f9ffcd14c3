"""The losses of preference tuning, as functions of the answers' log-probabilities.

Each takes sums over the tokens of the answers and returns a loss per sample, fp32 like its inputs.
LOSSES has those of pairs by the name that a recipe gives.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from runspec.keys.preference import DpoConfig

# The largest mean log-probability at which orpo's odds are computed: at 0 they are infinite.
HIGHEST = -1e-6


class Answers(NamedTuple):
    """What the losses are made of, all fp32 [pairs, 2], the chosen answer first."""

    # Sums over the tokens of an answer, by the policy.
    log_probs: torch.Tensor
    # By the model before training; zeros for losses without one.
    reference: torch.Tensor
    # Tokens of each answer.
    counts: torch.Tensor

    @property
    def means(self) -> torch.Tensor:
        """Mean log-probability of a token."""
        return self.log_probs / self.counts

    @property
    def ratios(self) -> torch.Tensor:
        """log(policy / reference) of each answer."""
        return self.log_probs - self.reference


def difference(values: torch.Tensor) -> torch.Tensor:
    """Chosen minus rejected, [pairs, 2] to [pairs]."""
    return values[:, 0] - values[:, 1]


def dpo(ratios: torch.Tensor, beta: float, label_smoothing: float = 0.0) -> torch.Tensor:
    """-log sigmoid(beta D), D the difference of the ratios (Rafailov et al., arXiv:2305.18290).

    label_smoothing e makes it (1 - e) L(D) + e L(-D), the conservative DPO (Mitchell 2023).
    """
    logits, share = beta * difference(ratios), label_smoothing
    return -(1 - share) * F.logsigmoid(logits) - share * F.logsigmoid(-logits)


def simpo(
    answers: Answers, beta: float, gamma: float, label_smoothing: float = 0.0
) -> torch.Tensor:
    """-log sigmoid(beta D - gamma), D of the means (SimPO, Meng et al., arXiv:2405.14734)."""
    logits = beta * difference(answers.means) - gamma
    share = label_smoothing
    return -(1 - share) * F.logsigmoid(logits) - share * F.logsigmoid(-logits)


def log_odds_ratio(answers: Answers) -> torch.Tensor:
    """log [odds(chosen) / odds(rejected)], odds p / (1 - p) of the mean log-probability log p.

    log(1 - p) is computed without cancellation, and p is at most exp(HIGHEST), so that it and its
    gradient are finite.
    """
    means = answers.means.clamp(max=HIGHEST)
    near = means > -0.6931472
    of_small = torch.log(-torch.expm1(torch.where(near, means, -1.0)))
    of_large = torch.log1p(-torch.exp(torch.where(near, -1.0, means)))
    return difference(means - torch.where(near, of_small, of_large))


def orpo(answers: Answers, beta: float) -> torch.Tensor:
    """-mean log p(chosen) - beta log sigmoid(log odds ratio) (Hong et al., arXiv:2403.07691)."""
    return -answers.means[:, 0] - beta * F.logsigmoid(log_odds_ratio(answers))


def kto(
    ratios: torch.Tensor, desirable: torch.Tensor, baseline: torch.Tensor, beta: float
) -> torch.Tensor:
    """1 - sigmoid(+-beta (ratio - baseline)) (Ethayarajh et al., arXiv:2402.01306).

    Args:
        ratios: log(policy / reference) of the answers, [samples].
        desirable: bool [samples]; the sign is minus for the others.
        baseline: how far policy and reference are apart, a scalar without gradient, 0 or more.
    """
    sign = torch.where(desirable, 1.0, -1.0).to(ratios.dtype)
    return 1 - torch.sigmoid(sign * beta * (ratios - baseline))


Pairs = tuple[torch.Tensor, torch.Tensor]


class PairLoss(NamedTuple):
    """A loss of pairs."""

    # From answers and config to the loss of each pair, [pairs], and the rewards, [pairs, 2].
    of: Callable[[Answers, DpoConfig], Pairs]
    # The optional keys of the config that it reads, or that are added to it.
    reads: tuple[str, ...] = ("sft_weight",)
    # The chosen answer's likelihood is in it.
    has_likelihood: bool = False


def _dpo(answers: Answers, config: DpoConfig) -> Pairs:
    ratios = answers.ratios / answers.counts if config.length_normalized else answers.ratios
    return dpo(ratios, config.beta, config.label_smoothing), config.beta * ratios


def _ipo(answers: Answers, config: DpoConfig) -> Pairs:
    """(D - 1 / (2 beta))^2, D of the ratios per token (Azar et al., arXiv:2310.12036)."""
    loss = (difference(answers.ratios / answers.counts) - 1 / (2 * config.beta)).square()
    return loss, config.beta * answers.ratios / answers.counts


def _simpo(answers: Answers, config: DpoConfig) -> Pairs:
    loss = simpo(answers, config.beta, config.simpo_gamma, config.label_smoothing)
    return loss, config.beta * answers.means


def _orpo(answers: Answers, config: DpoConfig) -> Pairs:
    return orpo(answers, config.beta), config.beta * answers.means


# By the values of the key `loss` (runspec/keys/preference.py).
LOSSES = {
    "dpo": PairLoss(_dpo, ("label_smoothing", "length_normalized", "sft_weight")),
    "ipo": PairLoss(_ipo),
    "simpo": PairLoss(_simpo, ("label_smoothing", "sft_weight")),
    "orpo": PairLoss(_orpo, (), has_likelihood=True),
}
