"""Learning rate schedules of torch: which work, resumed alike, and why the others are refused."""

import shutil
from typing import Any

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup

from tests.trainer.runs import metrics, reopen, train, write_config
from trainer import check, optimizers
from trainer.config import read_yaml
from trainer.errors import ConfigError
from trainer.methods.sft import SupervisedFineTuning

TORCH = "torch.optim.lr_scheduler."
ADAMW = {"_component_": "torch.optim.AdamW", "lr": 3e-3}
COSINE = "transformers.get_cosine_with_min_lr_schedule_with_warmup"
STEPS = 12
# Each with what it gives after `STEPS` steps from a rate of 3e-3.
CYCLE = {"_component_": f"{TORCH}OneCycleLR", "max_lr": 3e-3}
SCHEDULES: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 5},
    "MultiStepLR": {"milestones": [3, 7]},
    "ConstantLR": {},
    "LinearLR": {"start_factor": 0.1},
    "ExponentialLR": {"gamma": 0.9},
    "PolynomialLR": {"total_iters": 20},
    "CosineAnnealingLR": {"T_max": STEPS},
    "CosineAnnealingWarmRestarts": {"T_0": 5},
    "CyclicLR": {"base_lr": 1e-4, "max_lr": 1e-3, "step_size_up": 3},
    "OneCycleLR": {"max_lr": 3e-3},
}


def stepped(block: dict[str, Any], before: int) -> list[tuple[float, Any]]:
    """Rate and betas before each step; the first `before` steps are those of an earlier start."""
    optimizer = optimizers.build(ADAMW, [torch.nn.Parameter(torch.zeros(2, 2))])
    scheduler = optimizers.schedule(block, optimizer, STEPS)
    optimizers.advance(scheduler, before)
    seen = []
    for _ in range(STEPS - before):
        group = optimizer.param_groups[0]
        seen.append((float(group["lr"]), group["betas"]))
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_of_torch_is_resumed_bitwise(name):
    block = {"_component_": f"{TORCH}{name}", **SCHEDULES[name]}
    whole = stepped(block, 0)
    assert len({rate for rate, _ in whole}) > 1
    for before in (1, 6, 11):
        assert stepped(block, before) == whole[before:]


@pytest.mark.parametrize(("warmup", "cycles"), [(3, 0.5), (0, 1.5)])
def test_the_cosine_of_torchtunes_name_is_transformers(warmup, cycles):
    """torchtune's has the same formula, and so the same bits."""
    name = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
    block = {"_component_": name, "num_warmup_steps": warmup, "num_cycles": cycles}
    optimizer = optimizers.build(ADAMW, [torch.nn.Parameter(torch.zeros(2, 2))])
    theirs = get_cosine_schedule_with_warmup(optimizer, warmup, STEPS, cycles)
    expected = []
    for _ in range(STEPS):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    assert [rate for rate, _ in stepped(block, 0)] == expected


@pytest.mark.parametrize(
    "block",
    [
        {"_component_": COSINE, "warmup_ratio": 0.1, "min_lr": 1e-6},
        CYCLE,
    ],
    ids=["cosine", "cycle"],
)
def test_check_takes_it(block, tmp_path, model_folder, dataset):
    path = write_config(tmp_path, model_folder, dataset, lr_scheduler=block)
    assert check.faults(read_yaml(path), SupervisedFineTuning) == []


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ({"_component_": f"{TORCH}ReduceLROnPlateau"}, "ReduceLROnPlateau needs a metric"),
        ({"_component_": f"{TORCH}LambdaLR"}, "missing a required argument: 'lr_lambda'"),
        ({"_component_": f"{TORCH}StepLR"}, "missing a required argument: 'step_size'"),
        ({"_component_": f"{TORCH}StepLR", "step": 3}, "does not take this"),
        ({"_component_": "torch.nn.Identity"}, "LRScheduler"),
    ],
)
def test_what_cannot_work_is_refused(block, told, tmp_path, model_folder, dataset):
    path = write_config(tmp_path, model_folder, dataset, lr_scheduler=block)
    (fault,) = check.faults(read_yaml(path), SupervisedFineTuning)
    assert fault.startswith("lr_scheduler: ") and told in fault


def test_a_cycle_that_ends_before_the_run_is_refused():
    optimizer = optimizers.build(ADAMW, [torch.nn.Parameter(torch.zeros(2, 2))])
    with pytest.raises(ConfigError, match="ends after 11 steps, the run after 12; leave it out"):
        optimizers.schedule(CYCLE | {"total_steps": 11}, optimizer, STEPS)


def test_a_run_goes_on_with_rate_and_betas(tmp_path, model_folder, dataset):
    """OneCycleLR also changes the optimizer's betas, which no checkpoint gives back."""
    changes = {"lr_scheduler": CYCLE, "optimizer": ADAMW, "save_every_n_steps": 3}
    whole = write_config(tmp_path / "whole", model_folder, dataset, **changes)
    train(whole)
    folder = tmp_path / "resumed"
    shutil.copytree(tmp_path / "whole", folder)
    shutil.rmtree(folder / "export")
    shutil.rmtree(folder / "checkpoints/step_6")
    reopen(folder)
    assert "resuming from checkpoints/step_3" in train(
        write_config(folder, model_folder, dataset, **changes), attempt=1
    )
    assert [(line["loss"], line["lr"]) for line in metrics(folder)] == [
        (line["loss"], line["lr"]) for line in metrics(tmp_path / "whole")
    ]
