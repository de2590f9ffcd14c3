"""Model FLOPs against torch's own counter, and the rates that are made of them."""

from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from plugins.estimate.launcher.recipe_step import step_of
from tests.trainer.test_loss import CPU, LINEAR, MODELS, batch, random_model, token_loss
from trainer.metrics import Work, known_tflops, model_flops


@pytest.mark.parametrize("name", ["full", "lora", "lora-output", "tied"])
def test_they_equal_torchs_counter(
    name: str, tmp_path: Path, model_folder: Path, dataset: Path
) -> None:
    """3 samples of 50 tokens; only the half that is trained enters the output layer."""
    model = random_model(MODELS[name])
    loss = token_loss(tmp_path, model_folder, dataset, LINEAR)
    given = batch(0.5)
    # torch's counter has no entry for the product that is added in place.
    added = {torch.ops.aten.addmm_: lambda _, a, b, **other: 2 * a[0] * a[1] * b[1]}
    counter = FlopCounterMode(display=False, custom_mapping=added)
    with sdpa_kernel(SDPBackend.MATH), counter:
        loss(model, given, CPU).backward()
    # Plain attention multiplies also what the causal mask hides.
    found = model_flops(model)
    own = found.of(150, given.target_count) + found.pair * 3 * 50 * 50
    assert own == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize("name", ["full", "lora", "lora-output", "tied"])
def test_the_launchers_count_is_the_trainers(name: str) -> None:
    """But for the first layer, in which LoRA needs no gradient of the input of q, k and v."""
    block = MODELS[name]
    found = model_flops(random_model(block))
    step = step_of(
        {"model": block, "tokenizer": {"max_seq_len": 50}, "dtype": "fp32"},
        nodes=1,
        gpus_per_node=1,
    )
    counted = found.of(1, 1) + found.pair * 51 / 2
    if name in ("full", "tied"):
        assert step.flops.model == counted
    else:
        first = 2 * (128 * 128 + 2 * 128 * 64) + 3 * 2 * 4 * 128
        assert step.flops.model - counted == first


def test_frozen_weights_need_two_thirds_of_full_training() -> None:
    """LoRA of rank 4 on a model in which the adapter is small: about 4n FLOPs, not 6n."""
    full, lora = (model_flops(random_model(MODELS[name])) for name in ("full", "lora"))
    assert full.token == 6 * 3 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 512)
    assert 0.64 < lora.token / full.token < 0.72
    assert lora.target / full.target == pytest.approx(2 / 3)


def test_rates_are_of_all_gpus_and_mfu_of_the_known_peak() -> None:
    work = Work(steps=2, tokens=8000, flops=4e15, seconds=2.0)
    assert work.rates(8, 500.0) == {
        "tokens_per_second_per_gpu": 500.0,
        "tflops_per_second_per_gpu": 250.0,
        "mfu": 0.5,
    }
    assert work.rates(8, None)["mfu"] is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.1),
        ("NVIDIA B300 SXM6 AC", 2250.0),
        ("NVIDIA GB300", 2500.0),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None),
        ("Quadro T1000", None),
    ],
)
def test_peaks_are_found_by_the_drivers_name(name: str, peak: float | None) -> None:
    assert known_tflops(name) == peak
