"""Model FLOPs against torch's own counter, and the rates that are made of them."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.trainer.layers.test_loss import CPU, OWN, batch, random_model, token_loss
from trainer.metrics import Work, known_tflops, model_flops


@pytest.mark.parametrize("name", ["full", "lora", "lora-output", "tied"])
def test_they_equal_torchs_counter(name, tmp_path, model_folder, dataset):
    """3 samples of 50 tokens; only the half that is trained enters the output layer."""
    model = random_model(name, tmp_path)
    # Every layer of a block with something trained counts alike, the first one's too.
    model.embedding.register_forward_hook(lambda _, given, output: output.requires_grad_())
    loss = token_loss(tmp_path, model_folder, dataset, OWN)
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


def test_rates_are_of_all_gpus_and_mfu_of_the_known_peak():
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
def test_peaks_are_found_by_the_drivers_name(name, peak):
    assert known_tflops(name) == peak
