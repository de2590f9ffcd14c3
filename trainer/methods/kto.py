"""Preference tuning on single answers, each labelled as desirable or not: KTO."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from runspec.keys.preference import KtoConfig
from runspec.keys.train import TrainConfig
from trainer.data.batches import Batches
from trainer.data.form import SampleForm
from trainer.layers.batch import MicroBatch
from trainer.methods import preference_losses as losses
from trainer.methods.base import LossSum, Models
from trainer.methods.preference import PreferenceObjective, answer_sums

# Beyond this ratio of the labels' weights the rarer one is hardly learned (KTO's paper, 4.2).
BALANCED = 4 / 3


class UnpairedPreferenceTuning(PreferenceObjective):
    """A desirable answer is to become likelier than by the reference, an undesirable one less.

    How far policy and reference are apart, `kl`, is measured by answers that belong to other
    prompts, over the samples of a micro-step on all ranks, so that batches must not be of one.

    Figures: kl; rewards/chosen and rewards/rejected, beta times the log-ratio to the reference of
    desirable and of undesirable answers; logps/chosen and logps/rejected, their log-probabilities.
    Each is a mean over the answers of its label.
    """

    config_class: ClassVar[type[TrainConfig]] = KtoConfig
    form: ClassVar[SampleForm] = SampleForm(
        documents=(("tokens", "labels"), ("kl_tokens", "kl_labels")),
        number="desirable",
        preferences=KtoConfig.pairs,
    )
    counted: ClassVar[Mapping[str, str]] = {
        f"{name}/{label}": f"count/{label}"
        for name in ("rewards", "logps")
        for label in ("chosen", "rejected")
    }

    @classmethod
    def faults(cls, config: Any) -> list[str]:
        """Whether the distance of policy and reference can be measured."""
        texts = super().faults(config)
        if config.batch_size == 1 and not config.dataset.get("packed"):
            texts.append(
                "batch_size: KTO compares with the other samples of a micro-batch, and 1 has "
                "none; set batch_size=2 or more, or dataset.packed=True"
            )
        return texts

    def described(self, batches: Batches) -> list[str]:
        """How many samples have each label, and which weights balance them."""
        labels = batches.rows.samples.numbers
        count, wanted = len(labels), int(labels.sum())
        other = count - wanted
        line = f"{wanted:,} desirable and {other:,} undesirable answers"
        weights = self.config.desirable_weight * wanted, self.config.undesirable_weight * other
        if min(weights) > 0 and max(weights) / min(weights) > BALANCED:
            rarer = "undesirable_weight" if weights[0] > weights[1] else "desirable_weight"
            value = getattr(self.config, rarer) * max(weights) / min(weights)
            line += f"; {rarer}={value:.2g} would give both the same weight"
        return [line]

    def loss(self, models: Models, batch: MicroBatch) -> LossSum:
        config = self.config
        batch = batch.to(self.world.device)
        before = self.reference_sums(models, batch)
        sums = answer_sums(models.policy.module, batch)
        if before is None:
            raise RuntimeError("KTO has a reference")
        ratios = sums - before
        baseline = self.mean_over_data(ratios[:, 1].detach()).clamp_min(0)
        own, desirable = ratios[:, 0], batch.numbers > 0.5
        loss = losses.kto(own, desirable, baseline, config.beta)
        weight = torch.where(desirable, config.desirable_weight, config.undesirable_weight)
        figures = {"kl": baseline * len(own)}
        for label, mask in (("chosen", desirable), ("rejected", ~desirable)):
            figures[f"count/{label}"] = mask.sum()
            for name, value in (("rewards", config.beta * own), ("logps", sums[:, 0])):
                figures[f"{name}/{label}"] = (value.detach() * mask).sum()
        return LossSum((weight * loss).sum(), figures)
