"""Model FLOPs of a shape by hand, MFU and HFU."""

from dataclasses import replace

import pytest

from plugins.estimate.launcher.model_flops import of_shape
from runspec.flops import pairs, tflops_per_gpu
from runspec.shape import GatedDelta, Matrix
from tests.model_sizes import demo, with_experts

SHAPE = demo()
BLOCK = SHAPE.kinds[0]
MATRICES = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 512


def test_a_trained_weight_takes_six_flops_per_token():
    found = of_shape(SHAPE, full=True, ranks={})
    assert (found.token, found.target) == (6 * 3 * MATRICES, 6 * 128 * 1024)
    assert found.pair == 12 * 3 * 128
    assert found.of(10, 5, [10]) == 10 * found.token + 5 * found.target + 55 * found.pair
    forward = of_shape(SHAPE, full=True, ranks={}, backward=False)
    assert (forward.token, forward.target) == (2 * 3 * MATRICES, 2 * 128 * 1024)
    assert forward.pair == 4 * 3 * 128


def test_a_frozen_weight_takes_four_and_an_adapter_six():
    found = of_shape(SHAPE, full=False, ranks={"q": 4, "w2": 4, "output": 4})
    adapters = 4 * (128 + 128) + 4 * (512 + 128)
    assert found.token == 3 * (4 * MATRICES + 6 * adapters)
    assert found.target == 4 * 128 * 1024 + 6 * 4 * (128 + 1024)


def test_a_token_meets_its_active_experts_only():
    sparse = replace(SHAPE, kinds=(with_experts(BLOCK, 8, 2, 256, shared=256),))
    attention = 2 * 128 * 128 + 2 * 128 * 64
    met = attention + 128 * 8 + 3 * 3 * 128 * 256
    assert of_shape(sparse, full=True, ranks={}).token == 6 * 3 * met


def test_a_rate_is_flops_over_time_and_gpus():
    assert tflops_per_gpu(4e15, seconds=2.0, gpus=8) == pytest.approx(250)


def test_a_window_bounds_the_pairs_and_linear_attention_has_none():
    assert pairs(10) == 55 and pairs(10, 4) == 4 * 5 // 2 + 6 * 4 and pairs(3, 4) == 6
    matrices = {
        "qkv": Matrix("attention", "fused", 128, 128),
        "z": Matrix("attention", "column", 128, 64),
        "out": Matrix("attention", "row", 64, 128),
        **dict(BLOCK.of("mlp")),
    }
    delta = GatedDelta(2, 4, 16, 16, 4)
    linear = replace(BLOCK, matrices=matrices, attention=None, delta=delta)
    near = replace(BLOCK, attention=replace(BLOCK.attention, window=4))
    kinds = (near, BLOCK, linear)
    found = of_shape(replace(SHAPE, kinds=kinds, order=(0, 1, 2)), True, {})
    assert (found.pair, found.windowed) == (12 * 128, 12 * 128)
    assert found.attention([10, 3]) == 12 * 128 * (55 + 6 + 34 + 6)
    # Three products with a state of 4 x 16 x 16 numbers, and their gradients.
    plain = of_shape(SHAPE.cut(2), True, {})
    others = 128 * 192 + 64 * 128 + 3 * 128 * 512
    assert found.token == plain.token + 6 * others + 18 * 4 * 16 * 16
