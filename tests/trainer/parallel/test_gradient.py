"""The gradient of a step by itself, against torch's own functions."""

import torch

from trainer.optimizers import NonFiniteGuard
from trainer.parallel import gradients
from trainer.parallel import world as distributed


def test_a_fused_optimizer_clips_as_the_loop_does():
    distributed.start("cpu")
    try:
        fused, plain = _clipped(fused=True), _clipped(fused=False)
    finally:
        distributed.stop()
    torch.testing.assert_close(fused, plain)
    assert (fused[0] < 1).all()


def _clipped(fused: bool) -> list[torch.Tensor]:
    """Weights after a step whose gradients are clipped, and one whose gradients are small."""
    parameters = [torch.nn.Parameter(torch.ones(3, 4)), torch.nn.Parameter(torch.ones(5))]
    optimizer = torch.optim.SGD(parameters, lr=1.0, momentum=0.5, fused=fused)
    guard = NonFiniteGuard(optimizer, 3, torch.device("cpu"))
    for size in (7.0, 0.001):
        for index, parameter in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, size * (index + 1))
        guard.step(parameters, gradients.gradient_norm(parameters), 0.1)
    return [parameter.detach() for parameter in parameters]
