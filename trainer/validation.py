"""The loss on data that is not trained on."""

import torch

from trainer.data.batches import Batches
from trainer.objectives.base import Models, Objective
from trainer.parallel.fsdp import reshard
from trainer.parallel.tensor_parallel import vocabulary_split_loss


def validation_loss(objective: Objective, models: Models, batches: Batches) -> float:
    """The objective's mean loss over all targets of `batches`, each sample once.

    Leaves weights, gradients and random state as they were; all ranks call this together.
    """
    module, world, targets = models.policy.module, objective.world, 0
    total = torch.zeros((), device=world.device, dtype=torch.float64)
    module.eval()
    try:
        with torch.no_grad(), vocabulary_split_loss(world.tensor_parallel_dim):
            for (batch,) in batches.from_step(0):
                total += objective.loss(models, batch).total
                targets += batch.target_count
    finally:
        module.train()
        reshard(module)
    weight = world.data_weight
    loss_sum, count = world.sum([weight * total.item(), weight * targets])
    return loss_sum / count
