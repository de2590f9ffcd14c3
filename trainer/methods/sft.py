"""Supervised fine-tuning: cross-entropy over the tokens of the answers."""

from functools import cached_property
from typing import ClassVar

from runspec.keys.sft import SftConfig
from runspec.keys.train import TrainConfig
from trainer.errors import ConfigError
from trainer.layers.batch import MicroBatch
from trainer.layers.loss import TokenLoss
from trainer.methods.base import LossSum, Models, Objective


class SupervisedFineTuning(Objective):
    """One model, full or by an adapter, and the loss that the config names."""

    config_class: ClassVar[type[TrainConfig]] = SftConfig

    @classmethod
    def faults(cls, config: SftConfig) -> list[str]:
        """Whether the loss exists and fits; see `Objective.faults`."""
        try:
            TokenLoss(config)
        except ConfigError as error:
            return list(error.faults)
        return []

    @cached_property
    def _loss(self) -> TokenLoss:
        return TokenLoss(self.config)

    def loss(self, models: Models, batch: MicroBatch) -> LossSum:
        return LossSum(self._loss(models.policy.module, batch, self.world.device), {})
