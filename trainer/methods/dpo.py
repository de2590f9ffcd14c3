"""Preference tuning on pairs of answers: DPO, IPO, SimPO, ORPO."""

from typing import Any, ClassVar

import torch

from runspec.keys.preference import DpoConfig
from runspec.keys.train import TrainConfig
from trainer.data.batches import Batches
from trainer.data.form import SampleForm
from trainer.layers.batch import MicroBatch
from trainer.layers.log_probs import document_sums, token_log_probs
from trainer.methods.base import LossSum, Models
from trainer.methods.preference import PreferenceObjective
from trainer.methods.preference_losses import LOSSES, Answers, difference

PAIRS = SampleForm(
    # The names that torchtune's datasets of preferences have.
    documents=(
        ("chosen_input_ids", "chosen_labels"),
        ("rejected_input_ids", "rejected_labels"),
    ),
    preferences=DpoConfig.pairs,
)

# Keys that a loss may not use.
OPTIONAL = ("label_smoothing", "length_normalized", "sft_weight")


class PreferenceTuning(PreferenceObjective):
    """The chosen answer of a pair is to be likelier than the rejected one.

    Figures, means over the pairs: rewards/chosen and rewards/rejected, beta times the log-ratio to
    the reference (to 1 for losses without one; of means for losses of means); rewards/margins,
    their difference; rewards/accuracies, the share of pairs where it is above 0; logps/chosen and
    logps/rejected, log-probabilities of whole answers, which may both fall while the margin grows;
    nll/chosen, the mean negative log-likelihood of a token, if it is in the loss.
    """

    config_class: ClassVar[type[TrainConfig]] = DpoConfig
    form: ClassVar[SampleForm] = PAIRS

    @classmethod
    def faults(cls, config: Any) -> list[str]:
        """What of the loss's keys is not used, or outside of its range."""
        texts = super().faults(config)
        if config.label_smoothing >= 0.5:
            texts.append(f"label_smoothing: must be below 0.5, got {config.label_smoothing}")
        given = [each for each in OPTIONAL if getattr(config, each)]
        unused = [name for name in given if name not in LOSSES[config.loss].reads]
        said = f"loss={config.loss} does not use it; leave it out"
        return texts + [f"{name}: {said}" for name in unused]

    def described(self, batches: Batches) -> list[str]:
        """How much longer the chosen answers are: the policy may learn no more than that."""
        lengths = batches.rows.samples.documents
        by = float((lengths[:, 0] - lengths[:, 1]).mean())
        share = float((lengths[:, 0] > lengths[:, 1]).mean())
        word = "longer" if by >= 0 else "shorter"
        return [
            f"chosen answers are {abs(by):,.1f} tokens {word} than rejected ones on average, and "
            f"longer in {100 * share:.0f} % of the pairs"
        ]

    def loss(self, models: Models, batch: MicroBatch) -> LossSum:
        config = self.config
        batch = batch.to(self.world.device)
        before = self.reference_sums(models, batch)
        log_probs = token_log_probs(models.policy.module, batch)
        counts = document_sums(torch.ones_like(log_probs), batch).clamp_min(1)
        sums = document_sums(log_probs, batch)
        answers = Answers(sums, torch.zeros_like(sums) if before is None else before, counts)
        loss, rewards = LOSSES[config.loss].of(answers, config)
        figures = {}
        if config.sft_weight or LOSSES[config.loss].has_likelihood:
            figures["nll/chosen"] = -answers.means[:, 0]
        if config.sft_weight:
            loss = loss + config.sft_weight * figures["nll/chosen"]
        margins = difference(rewards)
        figures |= {
            "rewards/chosen": rewards[:, 0],
            "rewards/rejected": rewards[:, 1],
            "rewards/margins": margins,
            "rewards/accuracies": margins > 0,
            "logps/chosen": sums[:, 0],
            "logps/rejected": sums[:, 1],
        }
        return LossSum(loss.sum(), {n: value.detach().sum() for n, value in figures.items()})
