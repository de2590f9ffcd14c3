"""Losses and gradients against Liger Kernel's own: python -m benchmarks.peers.liger_losses."""

import json
from collections.abc import Callable

import pytest
import torch

from benchmarks.peers.liger_losses import VALUES
from benchmarks.peers.trl_rl import CASES
from trainer.layers.divergence import Divergence, distillation_loss
from trainer.layers.head import Factors
from trainer.methods import preference_losses as losses
from trainer.methods.preference_losses import Answers

CONTENT = json.loads(VALUES.read_text())
SUMS, REFERENCE, STUDENT, TEACHER = (
    torch.tensor(CONTENT["inputs"][name], dtype=torch.float64)
    for name in ("sums", "reference", "student", "teacher")
)
COUNTS = torch.tensor(CONTENT["inputs"]["counts"])
LABELS = torch.tensor([[True, False]] * len(SUMS)).flatten()


def _orpo(answers: Answers) -> torch.Tensor:
    # Liger adds the likelihood elsewhere.
    return losses.orpo(answers, 0.3) + answers.means[:, 0]


# With a reference of zeros DPO is CPO.
PAIRS: dict[str, Callable[[Answers], torch.Tensor]] = {
    "dpo": lambda answers: losses.dpo(answers.ratios, 0.3),
    "orpo": _orpo,
    "simpo": lambda answers: losses.simpo(answers, 2.0, 0.7, 0.1),
    "cpo": lambda answers: losses.dpo(answers.log_probs, 0.1, 0.1),
    "kto": lambda answers: losses.kto(answers.ratios.flatten(), LABELS, torch.tensor(0.4), 0.3),
}


def assert_same(name: str, loss: torch.Tensor, at: torch.Tensor) -> None:
    wanted = CONTENT["values"][name]
    assert loss.item() == pytest.approx(wanted["loss"], rel=1e-10)
    loss.backward()
    gradient = torch.tensor(wanted["gradient"], dtype=torch.float64)
    torch.testing.assert_close(at.grad, gradient, rtol=1e-9, atol=1e-12)


def test_nothing_of_ligers_is_left_out():
    tested = {*PAIRS, "jsd-0.0", "jsd-0.3", "jsd-1.0", *CASES}  # the last in test_policy_losses
    assert tested == CONTENT["values"].keys()


@pytest.mark.parametrize("name", PAIRS)
def test_losses_of_answers(name):
    sums = SUMS.clone().requires_grad_()
    assert_same(name, PAIRS[name](Answers(sums, REFERENCE, COUNTS)).mean(), sums)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_divergences(beta):
    student, one = STUDENT.clone().requires_grad_(), torch.eye(STUDENT.shape[1]).double()
    targets = torch.zeros(len(STUDENT), dtype=torch.int64)
    made_of = Factors([(student, one)]), Factors([(TEACHER, one)])
    assert_same(
        f"jsd-{beta}", distillation_loss(*made_of, targets, Divergence(beta)).total, student
    )
