"""Pre-training: cross-entropy over every token of plain text, and the z-loss."""

from typing import ClassVar

import torch

from runspec.keys.fields import STREAM
from runspec.keys.model import TRANSFORMERS
from runspec.keys.pretrain import PretrainConfig
from runspec.keys.train import TrainConfig
from trainer.data import stream
from trainer.data.batches import Data
from trainer.layers.batch import MicroBatch
from trainer.layers.head import Factors, through_head
from trainer.layers.log_probs import cross_entropy_with_z_loss
from trainer.methods.base import LossSum, Models, Objective


class Pretraining(Objective):
    """One model, whose loss goes through the output head in chunks.

    z_loss: z log(Z)^2 for each token, Z the sum of its softmax (PaLM, arXiv 2204.02311); the figure
    of this name is that term's mean, which is in the loss.
    """

    config_class: ClassVar[type[TrainConfig]] = PretrainConfig

    @classmethod
    def faults(cls, config: PretrainConfig) -> list[str]:
        texts = super().faults(config)
        if config.from_scratch:
            if config.model["_component_"] != TRANSFORMERS:
                texts.append(
                    "from_scratch: only a class of transformers knows its first weights; leave "
                    "model._component_ out, and name the folder of a config.json"
                )
            if set(config.model) - {"_component_"}:
                texts.append(
                    "from_scratch: an adapter needs the weights of a trained model; leave model.* "
                    "out, or set from_scratch=False"
                )
        return texts

    def build_data(self) -> Data:
        if self.config.dataset["_component_"] == STREAM:
            return stream.build(self.config, self.world)
        return super().build_data()

    def loss(self, models: Models, batch: MicroBatch) -> LossSum:
        batch = batch.to(self.world.device)
        weight = self.config.z_loss

        def of_logits(made_of: Factors) -> tuple[torch.Tensor, torch.Tensor]:
            return cross_entropy_with_z_loss(made_of, batch.targets, weight)

        total, z_term = through_head(models.policy.module, batch, of_logits)
        return LossSum(total, {"z_loss": z_term} if weight else {})
