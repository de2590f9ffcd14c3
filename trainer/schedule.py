"""Learning rate schedules that torchtune does not have."""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def get_constant_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int = 0,
    num_training_steps: int | None = None,
    last_epoch: int = -1,
) -> LambdaLR:
    """Rise linearly from 0 to the optimizer's lr over `num_warmup_steps`, then stay there.

    `num_training_steps` is ignored; it lets this schedule replace the cosine schedule.
    """

    def factor(step: int) -> float:
        return min(1.0, step / num_warmup_steps) if num_warmup_steps else 1.0

    return LambdaLR(optimizer, factor, last_epoch)
