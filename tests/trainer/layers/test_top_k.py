"""Top k and tail of a teacher: the plain formulas, and the loss on them."""

from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F

from tests.trainer.layers.test_divergence import TARGETS, TOKENS, VOCABULARY, inputs, logits, ours
from tests.trainer.layers.test_loss import NewTensors
from trainer.layers.batch import TopK
from trainer.layers.divergence import Divergence, distillation_loss
from trainer.layers.head import Factors
from trainer.layers.top_k import sampled_errors, top_k, top_k_loss

Tensors = list[torch.Tensor]


def kept(tensors: Tensors, k: int, heat: float, cap: float | None = None, **more: Any) -> TopK:
    teacher = Factors([(tensors[4], tensors[5])], None, cap, **more)
    return top_k(teacher, k, min(VOCABULARY, len(tensors[5])), heat)


def loss(tensors: Tensors, teacher: TopK, how: Divergence, cap: Any = None, **more: Any) -> Any:
    student = Factors([(tensors[0], tensors[1]), (tensors[2], tensors[3])], None, cap, **more)
    return top_k_loss(student, teacher, TARGETS, how, min(VOCABULARY, len(tensors[5])))


def plain_top_k(teacher: torch.Tensor, k: int, heat: float) -> TopK:
    log_probs = F.log_softmax(teacher / heat, 1)
    values, ids = log_probs.topk(k)
    rest = log_probs.scatter(1, ids, -torch.inf)
    return TopK(ids.int(), values, rest.logsumexp(1))


@pytest.mark.parametrize(("k", "heat", "share"), [(4, 1.0, 0.0), (4, 2.5, 0.4), (7, 1.0, 0.4)])
@pytest.mark.parametrize(
    ("vocabulary", "caps", "chunks"),
    [
        (VOCABULARY, (None, None), None),
        (VOCABULARY + 3, (2.0, 3.0), 4),
        (VOCABULARY - 4, (None, 3.0), 4),
    ],
)
def test_it_is_the_plain_formula_in_fp64(k, heat, share, vocabulary, caps, chunks):
    tensors, how = inputs(vocabulary), Divergence(0.0, heat, share)
    student, teacher = logits(tensors, caps)
    wanted, found = plain_top_k(teacher, k, heat), kept(tensors, k, heat, caps[1], chunks=chunks)
    torch.testing.assert_close(found, wanted)
    own, ids = F.log_softmax(student / heat, 1), wanted.ids.long()
    rest = own.scatter(1, ids, -torch.inf).logsumexp(1)
    value = (wanted.log_probs.exp() * (wanted.log_probs - own.gather(1, ids))).sum()
    value = heat**2 * (value + (wanted.tail.exp() * (wanted.tail - rest)).sum())
    entropy = F.cross_entropy(student, TARGETS, reduction="sum")
    total = (1 - share) * value + share * entropy
    sums = loss(tensors, found, how, caps[0], chunks=chunks)
    torch.testing.assert_close(sums.total, total)
    torch.testing.assert_close(sums.divergence, value.detach())
    torch.testing.assert_close(sums.cross_entropy, entropy.detach())
    assert sums.agreement == (student.argmax(1) == teacher.argmax(1)).sum()
    gradients = [torch.autograd.grad(each, tensors[:4]) for each in (sums.total, total)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("vocabulary", [VOCABULARY, VOCABULARY + 3, VOCABULARY - 4])
def test_the_whole_vocabulary_is_the_online_loss(vocabulary):
    tensors, how = inputs(vocabulary, torch.float32), Divergence(0.0, 1.5, 0.3)
    found, wanted = loss(tensors, kept(tensors, 100, 1.5), how), ours(tensors, how)
    for own, other in zip(found, wanted, strict=True):
        assert own.item() == pytest.approx(other.item(), abs=1e-5, rel=1e-6)
    gradients = [torch.autograd.grad(each.total, tensors[:4]) for each in (found, wanted)]
    torch.testing.assert_close(*gradients)


def test_an_online_loss_has_more_than_the_kept_one():
    """The measured error is the difference of both for a student with noise in its logits."""
    tensors = inputs(dtype=torch.float32)
    hidden, head = tensors[4], tensors[5]
    noise = torch.randn(TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(0))
    # A student with these logits: the noise comes by the rows of an identity matrix.
    student = Factors([(hidden, head), (noise, torch.eye(VOCABULARY))])
    teacher, how = Factors([(hidden, head)]), Divergence(0.0, 1.0)
    found = top_k(teacher, 5, VOCABULARY)
    count, tail, whole, over = sampled_errors(teacher, found, VOCABULARY, 1.0, 100)
    assert count == TOKENS and tail == pytest.approx(found.tail.exp().sum().item())
    online = distillation_loss(student, teacher, TARGETS, how).total
    assert whole.item() == pytest.approx(online.item(), rel=1e-4)
    of_kept = top_k_loss(student, found, TARGETS, how, VOCABULARY).total
    assert over.item() == pytest.approx(of_kept.item(), rel=1e-4) and over < whole


def test_probabilities_that_are_zero_give_numbers():
    hidden = torch.tensor([[300.0, -300.0, 0.0]])
    own = (hidden.clone().requires_grad_(), torch.eye(3))
    other = Factors([(hidden, torch.eye(3)[[1, 0, 2]])])
    found = top_k(other, 1, 3)
    sums = top_k_loss(Factors([own]), found, torch.tensor([0]), Divergence(0.0), 3)
    assert sums.total.item() == pytest.approx(600.0, rel=1e-4)
    (gradient,) = torch.autograd.grad(sums.total, own[:1])
    assert gradient.isfinite().all()


def of_kind(kind: str, student: Factors, teacher: Factors, targets: torch.Tensor) -> torch.Tensor:
    """The loss with a teacher that runs, or with what is kept of it."""
    if kind == "online":
        return distillation_loss(student, teacher, targets, Divergence(0.5)).total
    found = top_k(teacher, 3, student.width)
    assert found.ids.shape == (len(targets), 3)
    return top_k_loss(student, found, targets, Divergence(0.0), student.width).total


@pytest.mark.parametrize("kind", ["online", "kept"])
def test_logits_do_not_exist_as_a_whole(kind):
    generator = torch.Generator().manual_seed(3)
    own, other = (
        (torch.randn(2048, dim, generator=generator), torch.randn(768, dim, generator=generator))
        for dim in (512, 640)
    )
    targets = torch.randint(0, 768, (2048,), generator=generator)
    own = tuple(tensor.requires_grad_() for tensor in own)
    with NewTensors() as seen:
        of_kind(kind, Factors([own]), Factors([other]), targets).backward()
    assert max(seen.sizes) < 2048 * 768


@pytest.mark.parametrize("kind", ["online", "kept"])
def test_no_token_gives_zero_gradients(kind):
    tensors = inputs(dtype=torch.float32)
    student, teacher = (Factors([(tensors[i][:0], tensors[i + 1])]) for i in (0, 4))
    total = of_kind(kind, student, teacher, TARGETS[:0])
    (gradient,) = torch.autograd.grad(total, tensors[1:2])
    assert total == 0 and not gradient.any()


def split(rank: int, store: str, vocabulary: int, heat: float, k: int) -> None:
    """One of two ranks, each with its rows of both heads."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    group, how = torch.distributed.group.WORLD, Divergence(0.0, heat, 0.3)
    tensors = inputs(vocabulary)
    own = [tensors[0], tensors[1].chunk(2)[rank], tensors[2], tensors[3].chunk(2)[rank]]
    student = Factors([(own[0], own[1]), (own[2], own[3])], group, chunks=2)
    teacher = Factors([(tensors[4], tensors[5].chunk(2)[rank])], group, chunks=2)
    common = min(vocabulary, VOCABULARY)
    found, wanted = top_k(teacher, k, common, heat), kept(tensors, k, heat)
    torch.testing.assert_close(found, wanted)
    errors = sampled_errors(teacher, found, common, heat, 5)
    whole = sampled_errors(Factors([(tensors[4], tensors[5])]), wanted, common, heat, 5)
    torch.testing.assert_close(errors, whole, rtol=1e-4, atol=1e-5)
    sums = top_k_loss(student, found, TARGETS, how, common)
    expected = loss(tensors, wanted, how)
    torch.testing.assert_close(tuple(sums), tuple(expected))
    gradients, all_of = (torch.autograd.grad(each.total, tensors[:4]) for each in (sums, expected))
    for gradient, other in zip(gradients, all_of, strict=True):
        torch.distributed.all_reduce(gradient)
        torch.testing.assert_close(gradient, other)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("vocabulary", "heat", "k"), [(30, 1.0, 4), (26, 1.5, 20), (34, 1.0, 30)])
def test_a_split_vocabulary_gives_the_same(vocabulary, heat, k, tmp_path):
    arguments = (str(tmp_path / "store"), vocabulary, heat, k)
    mp.start_processes(split, arguments, 2, start_method="fork")
