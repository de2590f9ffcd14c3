"""The distillation loss is the plain formula and torchtune's, and never holds all logits."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from trainer.layers.divergence import Divergence, distillation_loss
from trainer.layers.head import Factors

TOKENS, VOCABULARY = 9, 30
TARGETS = torch.randint(0, VOCABULARY - 4, (TOKENS,), generator=torch.Generator().manual_seed(2))
Tensors = list[torch.Tensor]


def inputs(vocabulary: int = VOCABULARY, dtype: torch.dtype = torch.float64) -> Tensors:
    """Hidden states, head, and the two factors of LoRA on it; then those of a wider teacher."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((TOKENS, 5), (VOCABULARY, 5), (TOKENS, 2), (VOCABULARY, 2))
    own = [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]
    shapes = ((TOKENS, 7), (vocabulary, 7))
    return own + [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def logits(tensors: Tensors, caps: Any = (None, None)) -> tuple[torch.Tensor, torch.Tensor]:
    student = tensors[0] @ tensors[1].T + tensors[2] @ tensors[3].T
    both = (student, tensors[4] @ tensors[5].T)
    student, teacher = (
        x if cap is None else cap * torch.tanh(x / cap) for x, cap in zip(both, caps, strict=True)
    )
    common = min(student.shape[1], teacher.shape[1])
    return student[:, :common], teacher[:, :common]


def ours(tensors: Tensors, how: Divergence, caps: Any = (None, None), **more: Any) -> Any:
    student = Factors([(tensors[0], tensors[1]), (tensors[2], tensors[3])], None, caps[0], **more)
    teacher = Factors([(tensors[4], tensors[5])], softcap=caps[1])
    return distillation_loss(student, teacher, TARGETS, how)


def plain(
    student: torch.Tensor, teacher: torch.Tensor, targets: torch.Tensor, how: Divergence
) -> torch.Tensor:
    """The formula as it is written, summed over the tokens."""
    b, heat, share = how
    p_s, p_t = (F.softmax(x / heat, 1) for x in (student, teacher))
    m = {0: p_s, 1: p_t}.get(b, b * p_t + (1 - b) * p_s)
    weights = (1.0, 0.0) if b == 0 else (0.0, 1.0) if b == 1 else (b, 1 - b)
    value = (weights[0] * p_t * (p_t / m).log() + weights[1] * p_s * (p_s / m).log()).sum()
    entropy = F.cross_entropy(student, targets, reduction="sum")
    return (1 - share) * heat**2 * value + share * entropy


@pytest.mark.parametrize(
    ("beta", "heat", "share"), [*product((0.0, 0.3, 1.0), (1.0, 2.5), (0.0, 0.4)), (0.5, 0.9, 0.0)]
)
def test_it_is_the_plain_formula_in_fp64(beta, heat, share):
    how = Divergence(beta, heat, share)
    cases: list[tuple[int, Any, int | None]] = [
        (VOCABULARY, (None, None), None),
        (VOCABULARY, (2.0, 3.0), 4),
        (VOCABULARY + 3, (None, None), 4),
        (VOCABULARY - 4, (None, 3.0), 4),
    ]
    for vocabulary, caps, chunks in cases:
        tensors = inputs(vocabulary)
        found = ours(tensors, how, caps, chunks=chunks)
        student, teacher = logits(tensors, caps)
        wanted = plain(student, teacher, TARGETS, how)
        torch.testing.assert_close(found.total, wanted)
        entropy = F.cross_entropy(student, TARGETS, reduction="sum")
        torch.testing.assert_close(found.cross_entropy, entropy.detach())
        assert found.agreement == (student.argmax(1) == teacher.argmax(1)).sum()
        gradients = [torch.autograd.grad(each, tensors[:4]) for each in (found.total, wanted)]
        torch.testing.assert_close(*gradients)


# What torchtune 0.6.1's ForwardKLLoss, ReverseKLLoss and SymmetricKLLoss(0.3) give for `inputs` in
# fp32: the loss, and norm and first number of its gradients by the student's four tensors.
TORCHTUNES: dict[str, tuple[float, list[float], list[float]]] = {
    "forward": (
        5.8241744,
        [0.78893006, 0.51489115, 0.42946145, 0.27793851],
        [-0.080233872, 0.031315204, -0.07249742, 0.042392373],
    ),
    "reverse": (
        3.5611546,
        [0.63203722, 0.71403432, 0.6219632, 0.68107337],
        [0.032799885, -0.0010782495, 0.050116166, 0.0034203581],
    ),
    "symmetric": (
        4.2400603,
        [0.54269469, 0.55980188, 0.52728248, 0.51327437],
        [-0.0011102428, 0.0086397864, 0.013332072, 0.015111963],
    ),
}


@pytest.mark.parametrize("kind", TORCHTUNES)
def test_it_is_torchtunes_loss(kind):
    """Its forward KL is a cross-entropy: it lacks the teacher's entropy, which has no gradient."""
    tensors = inputs(dtype=torch.float32)
    _, teacher = logits(tensors)
    shares = {"forward": (1.0, 0.0), "reverse": (0.0, 1.0), "symmetric": (0.3, 0.7)}[kind]
    each = [ours(tensors, Divergence(beta)).total / TOKENS for beta in (0.0, 1.0)]
    found = sum(share * value for share, value in zip(shares, each, strict=True))
    p_t = teacher.softmax(1)
    entropy = -(p_t * p_t.log()).sum(1).mean()
    wanted, norms, firsts = TORCHTUNES[kind]
    torch.testing.assert_close(found, torch.tensor(wanted) - shares[0] * entropy)
    gradients = torch.autograd.grad(found, tensors[:4])
    torch.testing.assert_close([g.norm() for g in gradients], [*torch.tensor(norms)])
    torch.testing.assert_close([g[0, 0] for g in gradients], [*torch.tensor(firsts)])


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_probabilities_that_are_zero_give_numbers(beta):
    hidden = torch.tensor([[300.0, -300.0]])
    heads = [torch.eye(2), torch.tensor([[0.0, 1.0], [1.0, 0.0]])]
    own = (hidden.clone().requires_grad_(), heads[0])
    found = distillation_loss(
        Factors([own]), Factors([(hidden, heads[1])]), torch.tensor([0]), Divergence(beta)
    )
    wanted = 600.0 if beta in (0, 1) else torch.tensor(2.0).log().item()
    assert found.total.item() == pytest.approx(wanted, rel=1e-4)
    (gradient,) = torch.autograd.grad(found.total, own[:1])
    assert gradient.isfinite().all()
