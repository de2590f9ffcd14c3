"""The learning rate schedule that recipes name by torchtune's name."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
) -> LambdaLR:
    """Rise linearly from 0 to the optimizer's lr, then follow half a cosine to 0 (SGDR)."""

    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return step / num_warmup_steps
        done = (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * done)))

    return LambdaLR(optimizer, factor, last_epoch)
