"""The gradient of a step by itself, against torch's own functions."""

from pathlib import Path

import torch
import torch.nn.functional as F

from tests.trainer.runs import write_config
from trainer.config import load
from trainer.layers.batch import IGNORE_INDEX
from trainer.loop import Trainer
from trainer.methods.sft import SupervisedFineTuning
from trainer.optimizers import NonFiniteGuard
from trainer.parallel import gradients
from trainer.parallel import world as distributed
from trainer.sharded import full_tensor


def test_it_is_of_the_mean_over_all_targets_of_the_step_and_clipped_as_torch_clips(
    tmp_path: Path, model_folder: Path, dataset: Path
) -> None:
    path = write_config(
        tmp_path, model_folder, dataset, batch_size=2, gradient_accumulation_steps=3
    )
    try:
        trainer = Trainer(load(path), distributed.start("cpu"), 0, SupervisedFineTuning)
        parameters = trainer.model.trainable
        micro_batches = next(trainer.batches.from_step(0))
        targets = sum(batch.target_count for batch in micro_batches)
        assert len({batch.target_count for batch in micro_batches}) > 1
        total = sum(
            F.cross_entropy(
                trainer.model.module(batch.inputs).flatten(0, 1),
                batch.labels.flatten(),
                ignore_index=IGNORE_INDEX,
                reduction="sum",
            )
            for batch in micro_batches
        )
        wanted = [full_tensor(g) for g in torch.autograd.grad(total / targets, parameters)]
        sums = trainer._backward(micro_batches, targets)
        torch.testing.assert_close(sums["loss"], total.detach())
        for parameter, gradient in zip(parameters, wanted, strict=True):
            torch.testing.assert_close(full_tensor(parameter.grad), gradient, rtol=1e-4, atol=1e-6)

        plain = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in wanted]
        for parameter, gradient in zip(plain, wanted, strict=True):
            parameter.grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(plain, 0.1)
        assert norm > 0.1
        own_norm = gradients.gradient_norm(parameters)
        torch.testing.assert_close(own_norm, norm)
        gradients.clip_gradients(parameters, own_norm, 0.1)
        for parameter, clipped in zip(parameters, plain, strict=True):
            own = full_tensor(parameter.grad)
            torch.testing.assert_close(own, clipped.grad, rtol=1e-4, atol=1e-6)
    finally:
        distributed.stop()


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
