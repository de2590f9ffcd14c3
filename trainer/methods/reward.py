"""Reward models: a score head at the last token of each answer, trained on pairs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F

from runspec.keys.reward import RewardConfig
from runspec.keys.train import TrainConfig
from trainer.data.form import SampleForm
from trainer.layers.batch import MicroBatch
from trainer.methods.base import LossSum, Models, Objective
from trainer.methods.dpo import PAIRS
from trainer.model import Decoder


class RewardModelling(Objective):
    """The chosen answer of a pair is to get the higher reward (Ouyang et al., arXiv 2203.02155).

    Figures, means over the pairs: rewards/chosen and rewards/rejected; rewards/margins, their
    difference; rewards/accuracies, the share of pairs where it is above 0; rewards/mean, over both.
    And rewards/min and rewards/max, of all answers of the step.
    """

    config_class: ClassVar[type[TrainConfig]] = RewardConfig
    # A margin belongs to the pair: by how much the one answer is better.
    form: ClassVar[SampleForm] = replace(PAIRS, number="margin")
    normaliser = "samples"
    extremes: ClassVar[Mapping[str, Literal["min", "max"]]] = {
        "rewards/min": "min",
        "rewards/max": "max",
    }

    @classmethod
    def faults(cls, config: Any) -> list[str]:
        """A reward model has no output head that an adapter could change."""
        texts = super().faults(config)
        if "lm_head" in (config.model.get("lora_modules") or ()):
            texts.append(
                "model.lora_modules: a reward model has a score head, which is trained whole, in "
                "place of lm_head; leave it out"
            )
        return texts

    def loss(self, models: Models, batch: MicroBatch) -> LossSum:
        batch = batch.to(self.world.device)
        rewards = document_scores(models.policy.module, batch)
        rewards = rewards.view(-1, batch.documents_per_sample)
        chosen, rejected = rewards.unbind(1)
        loss = pair_loss(chosen, rejected, batch.numbers, self.config.center_rewards_coefficient)
        margins = chosen - rejected
        figures = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": margins,
            "rewards/accuracies": margins > 0,
            "rewards/mean": rewards.mean(1),
        }
        sums = {name: value.detach().sum() for name, value in figures.items()}
        # A rank may have no pair in a micro-step.
        scores, none = rewards.detach().flatten(), rewards.new_full((1,), torch.inf)
        sums["rewards/min"] = torch.cat([scores, none]).min()
        sums["rewards/max"] = torch.cat([scores, -none]).max()
        return LossSum(loss.sum(), sums)


def document_scores(model: Decoder, batch: MicroBatch) -> torch.Tensor:
    """The score of each document that counts, at its last token.

    The token is found by the document's length: which tokens pad rows and end documents does not
    matter.

    Args:
        batch: on the model's device.

    Returns:
        [documents], fp32.
    """

    def output(model: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        return model.scores(hidden, batch.ends)

    return model(batch.inputs, output=output)


def pair_loss(
    chosen: torch.Tensor, rejected: torch.Tensor, margins: torch.Tensor, centre: float
) -> torch.Tensor:
    """The loss of each pair, [pairs]: -log sigmoid(chosen - rejected - margin), and centring.

    The margin is Llama 2's (arXiv 2307.09288), centre * (chosen + rejected)^2 that of Eisenstein
    et al. (arXiv 2312.09244).
    """
    loss = -F.logsigmoid(chosen - rejected - margins)
    return loss + centre * (chosen + rejected).square() if centre else loss
