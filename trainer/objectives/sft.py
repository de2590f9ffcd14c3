"""Supervised fine-tuning: cross-entropy over the tokens of the answers."""

from trainer.data import batches
from trainer.data.batches import Data, MicroBatch
from trainer.layers.loss import TokenLoss
from trainer.models import build
from trainer.objectives.base import LossSum, Models, Objective


class SupervisedFineTuning(Objective):
    """One model, full or by an adapter, and the loss that the config names."""

    def build_data(self) -> Data:
        return batches.build(self.config, self.world)

    def build_models(self, data: Data) -> Models:
        self._loss = self.world.on_all(lambda: TokenLoss(self.config))
        chunks = self._loss.output_chunks
        return Models(build.build(self.config, self.world, chunks, data.faults))

    def loss(self, models: Models, batch: MicroBatch) -> LossSum:
        return LossSum(self._loss(models.policy.module, batch, self.world.device), {})
