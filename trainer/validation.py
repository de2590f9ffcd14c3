"""The loss on data that is not trained on."""

import torch

from trainer import parallel
from trainer.data import Batches
from trainer.distributed import World
from trainer.loss import TokenLoss
from trainer.models import Model
from trainer.tensor_parallel import vocabulary_split_loss


def validation_loss(model: Model, loss: TokenLoss, batches: Batches, world: World) -> float:
    """Mean cross-entropy over all trained tokens of `batches`, each sample once.

    Leaves weights, gradients and random state as they were; all ranks call this together.
    """
    module, targets = model.module, 0
    total = torch.zeros((), device=world.device, dtype=torch.float64)
    module.eval()
    try:
        with torch.no_grad(), vocabulary_split_loss(world.tensor_parallel_dim):
            for (batch,) in batches.from_step(0):
                total += loss(module, batch, world.device)
                targets += batch.target_count
    finally:
        module.train()
        parallel.reshard(module)
    weight = world.data_weight
    loss_sum, count = world.sum([weight * total.item(), weight * targets])
    return loss_sum / count
