"""A training method in one file: the next token of raw text, with a z-loss on the logits.

torchrun ... -m tests.trainer.toy_objective <run>/train.yaml

The z-loss (log sum exp of the logits, squared) keeps logits from drifting (PaLM, Chowdhery et al.
2022, arXiv 2204.02311, section 5). Its weight is a key of the method. The loss is a mean over
documents, not over tokens.
"""

import sys
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from runspec.keys.key import Key
from trainer import start
from trainer.config import KEYS, TrainConfig
from trainer.data import batches
from trainer.data.batches import Data, MicroBatch
from trainer.models import build
from trainer.objectives.base import LossSum, Models, Objective

Z_WEIGHT = Key("z_weight", "number", "Weight of the z-loss.", 1e-3)


class NextTokenWithZLoss(Objective):
    """The dataset gives raw text (torchtune.datasets.text_completion_dataset)."""

    keys: ClassVar[Mapping[str, Key]] = {**KEYS, "z_weight": Z_WEIGHT}

    @classmethod
    def faults(cls, config: TrainConfig) -> list[str]:
        return [] if config.z_weight <= 1 else ["z_weight: must be at most 1"]

    def build_data(self) -> Data:
        return batches.build(self.config, self.world)

    def build_models(self, data: Data) -> Models:
        return Models(build.build(self.config, self.world, data_faults=data.faults))

    def loss(self, models: Models, batch: MicroBatch) -> LossSum:
        batch = batch.to(self.world.device)
        logits = models.policy.module(batch.tokens, mask=batch.documents, input_pos=batch.positions)
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        logits = logits.float().flatten(0, 1)[batch.trained]
        targets = batch.labels.flatten()[batch.trained]
        cross_entropy = F.cross_entropy(logits, targets, reduction="sum")
        z_loss = torch.logsumexp(logits, dim=-1).square().sum()
        total = cross_entropy + self.config.z_weight * z_loss
        return LossSum(total, {"cross_entropy": cross_entropy.detach(), "z_loss": z_loss.detach()})

    def target_count(self, batch: MicroBatch) -> int:
        return len(batch.lengths)


def main(arguments: list[str]) -> int:
    return start.main(arguments, NextTokenWithZLoss)


if __name__ == "__main__":
    start.leave(main(sys.argv[1:]))
