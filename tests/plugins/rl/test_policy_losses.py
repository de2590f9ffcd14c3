"""Policy optimisation's losses and gradients against TRL's and Liger's.

python -m benchmarks.peers.trl_rl and python -m benchmarks.peers.liger_losses make their values.
"""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.peers import liger_losses
from benchmarks.peers.trl_rl import CAP, CASES, HIGH, LENGTHS, LONGEST, LOW, VALUES
from plugins.rl import policy_losses as losses
from plugins.rl.policy_losses import LogProbs, Rule
from trainer.data.batches import Collator, Row
from trainer.layers.batch import MicroBatch

CONTENT = json.loads(VALUES.read_text())
THEIRS = {
    "trl": CONTENT["values"],
    "liger": json.loads(liger_losses.VALUES.read_text())["values"],
}
MASK = torch.arange(LONGEST) < torch.tensor(LENGTHS).unsqueeze(1)


def batch() -> MicroBatch:
    """Prompts of two tokens, and answers of these lengths."""
    rows = [
        Row([(np.ones(2 + n, np.int64), np.arange(2 + n) >= 2)], True, np.array([i]))
        for i, n in enumerate(LENGTHS)
    ]
    return Collator(0).collate(rows)


def given(name: str) -> torch.Tensor:
    """Values of the trained tokens, in the batch's order."""
    return torch.tensor(CONTENT["inputs"][name], dtype=torch.float64)[MASK]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("peer", THEIRS)
def test_losses_and_gradients_are_theirs(peer: str, name: str) -> None:
    wanted, policy = THEIRS[peer][name], given("policy").requires_grad_()
    beta = CASES[name][2]
    cap = CAP if name == "dapo-truncated" else None
    rule = Rule(name.partition("-")[0], LOW, HIGH, beta, cap, LONGEST)
    reference = given("reference") if beta else None
    found = LogProbs(policy, given("old"), given("sampled"), reference)
    advantage = torch.tensor(CONTENT["inputs"]["advantages"], dtype=torch.float64)
    total, figures = losses.policy_loss(found, advantage, batch(), rule)
    targets = sum(LENGTHS) if rule.over_tokens else len(LENGTHS)
    (total / targets).backward()
    assert (total / targets).item() == pytest.approx(wanted["loss"], rel=1e-8)
    gradient = torch.tensor(wanted["gradient"], dtype=torch.float64)[MASK]
    torch.testing.assert_close(policy.grad, gradient, rtol=1e-7, atol=1e-10)
    assert figures.keys() >= {"entropy", "clip/low", "clip/high", "kl/sampler"}
    assert ("kl" in figures) == bool(beta)
    # The first update on an answer: nothing is clipped, and the sampler's ratio is all there is.
    first = losses.policy_loss(LogProbs(policy), advantage, batch(), rule)[1]
    assert first["clip/low"] == first["clip/high"] == 0


@pytest.mark.parametrize(
    ("scale", "wanted"),
    [
        (True, [[0.5, -1.5, 0.5, 0.5], [0, 0, 0, 0], [0, 0.7071, -0.7071, 0]]),
        (False, [[0.25, -0.75, 0.25, 0.25], [0, 0, 0, 0], [0, 1, -1, 0]]),
    ],
)
def test_advantages_within_groups(scale: bool, wanted: Any) -> None:
    # Of the last two groups one has no variance, and one two answers without a reward.
    rewards = torch.tensor([[1, 0, 1, 1], [2, 2, 2, math.nan], [math.nan, 3, 1, math.nan]])
    found = losses.advantages(rewards, scale)
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=0, atol=4e-4)
    assert losses.without_variance(rewards).tolist() == [False, True, False]
    alone = torch.tensor([[math.nan, 1.0]])
    assert losses.advantages(alone, scale).tolist() == [[0, 0]]
    assert losses.without_variance(alone).tolist() == [True]


def test_the_last_tokens_are_punished() -> None:
    found = losses.overlong(torch.tensor([1, 60, 80, 90, 100]), 100, 20)
    assert found.tolist() == pytest.approx([0, 0, 0, -0.5, -1])
