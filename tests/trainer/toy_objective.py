"""A training method in one file: the next token of raw text, with a z-loss on the logits.

torchrun ... -m tests.trainer.toy_objective <run>/train.yaml

The z-loss (log sum exp of the logits, squared) keeps logits from drifting (PaLM, Chowdhery et al.
2022, arXiv 2204.02311, section 5).
"""

import sys

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from trainer import start
from trainer.data import batches
from trainer.data.batches import Data, MicroBatch
from trainer.models import build
from trainer.objectives.base import LossSum, Models, Objective

Z_WEIGHT = 1e-3


class NextTokenWithZLoss(Objective):
    """The dataset gives raw text (torchtune.datasets.text_completion_dataset)."""

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
        total = cross_entropy + Z_WEIGHT * z_loss
        return LossSum(total, {"cross_entropy": cross_entropy.detach(), "z_loss": z_loss.detach()})


def main(arguments: list[str]) -> int:
    return start.main(arguments, NextTokenWithZLoss)


if __name__ == "__main__":
    start.leave(main(sys.argv[1:]))
