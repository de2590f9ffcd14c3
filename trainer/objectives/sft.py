"""Supervised fine-tuning: cross-entropy over the tokens of the answers."""

from functools import cached_property
from typing import TYPE_CHECKING

from trainer.config import TrainConfig
from trainer.data import batches
from trainer.data.batches import Data, MicroBatch
from trainer.errors import ConfigError
from trainer.layers.loss import TokenLoss
from trainer.models import build
from trainer.models.build import Model
from trainer.objectives.base import LossSum, Models, Objective
from trainer.parallel.world import World

if TYPE_CHECKING:
    from trainer.layers.balance import Balance


class SupervisedFineTuning(Objective):
    """One model, full or by an adapter, and the loss that the config names."""

    _balance: "Balance | None" = None

    @classmethod
    def faults(cls, config: TrainConfig) -> list[str]:
        """Whether the loss exists and fits; see `Objective.faults`."""
        try:
            TokenLoss(config)
        except ConfigError as error:
            return error.faults
        return []

    @cached_property
    def _loss(self) -> TokenLoss:
        return TokenLoss(self.config)

    @property
    def output_chunks(self) -> int:
        """In how many chunks the model gives its logits."""
        return self._loss.output_chunks

    def build_data(self) -> Data:
        return batches.build(self.config, self.world)

    def build_models(self, data: Data) -> Models:
        chunks = self.world.on_all(lambda: self.output_chunks)
        model = build.build(self.config, self.world, chunks, data.faults)
        self._balance = balance_of(model, self.config, self.world)
        return Models(model)

    def loss(self, models: Models, batch: MicroBatch) -> LossSum:
        total = self._loss(models.policy.module, batch, self.world.device)
        if self._balance is None:
            return LossSum(total, {})
        metrics = self._balance.metrics()
        return LossSum(total, {name: x * batch.target_count for name, x in metrics.items()})


def balance_of(model: Model, config: TrainConfig, world: World) -> "Balance | None":
    """Watch the routers of `model`; None if it has none."""
    routers = model.module.routers()
    if not routers:
        return None
    # Imported late: most models have no routers, and a rank is to start fast.
    from trainer.layers.balance import Balance

    parts = config.gradient_accumulation_steps * world.tensor_parallel_dim
    return Balance(routers, config.router_aux_loss_coef, parts)
