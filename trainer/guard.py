"""Updates that are not finite are left out on every rank, and too many in a row end the run."""

import torch
from torch.optim import Optimizer

from trainer.errors import NonFiniteLossError


class NonFiniteGuard:
    """Stands between the gradients and the optimizer.

    Fused optimizers of torch take the verdict on the device and leave weights and state alone (as
    they do for torch.amp's GradScaler); the GPU is never waited for. For any other optimizer
    the verdict is read before each step, which waits for the backward pass.

    Args:
        limit: so many steps in a row without an update end the run.
        skipped: updates that earlier starts of the run left out.
    """

    def __init__(
        self, optimizer: Optimizer, limit: int, device: torch.device, skipped: int = 0
    ) -> None:
        self._optimizer, self._limit = optimizer, limit
        self._decides_on_device = getattr(optimizer, "_step_supports_amp_scaling", False)
        # Left out in all, in a row until now, and the most in a row.
        self._counts = torch.tensor([skipped, 0, 0], device=device)
        # A copy that arrives whenever the device comes to it: late, but without waiting.
        self._arrived = torch.zeros(3, dtype=torch.int64, pin_memory=device.type == "cuda")
        # The same memory, read by no operator of torch.
        self._known = self._arrived.numpy()

    def step(self, norm: torch.Tensor) -> None:
        """Step the optimizer unless `norm`, alike on all ranks, is not finite (a scalar)."""
        bad = ~norm.isfinite()
        if self._decides_on_device:
            self._optimizer.grad_scale, self._optimizer.found_inf = None, bad.float()
            self._optimizer.step()
        elif not bad.item():
            self._optimizer.step()
        total, row, most = self._counts.unbind()
        bad = bad.to(self._counts.device)
        row = (row + 1) * bad
        self._counts = torch.stack([total + bad, row, torch.maximum(most, row)])
        self._arrived.copy_(self._counts, non_blocking=True)

    def exceeded(self) -> bool:
        """True once it is known here that too many came in a row; the ranks must agree on it."""
        return int(self._known[2]) >= self._limit

    def counts(self) -> tuple[int, int]:
        """(left out in all, in a row until now); waits for the device."""
        total, row, _ = self._counts.tolist()
        return total, row

    def fault(self, step: int) -> NonFiniteLossError:
        """What to raise if the ranks have agreed that the limit is exceeded after `step`."""
        return NonFiniteLossError(
            f"step {step}: the loss or the gradient was not finite in {self._limit} steps in a "
            "row; none of them changed the weights, and no checkpoint holds what followed; lower "
            "optimizer.lr or set clip_grad_norm=1.0, then start a new run"
        )
