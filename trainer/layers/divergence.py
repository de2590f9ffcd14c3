"""The distillation loss of a student and a teacher, by chunks of both output heads."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule

from trainer.errors import ConfigError
from trainer.layers.batch import MicroBatch
from trainer.layers.head import Factors, Group, Loss, capped, over_ranks, own_columns, through_head


class Divergence(NamedTuple):
    """Which loss: (1 - share) * temperature^2 * divergence + share * cross-entropy."""

    # Of the generalised Jensen-Shannon divergence (Agarwal et al. 2023, arXiv 2306.13649): with
    # m = beta * p_t + (1 - beta) * p_s it is beta * KL(p_t | m) + (1 - beta) * KL(p_s | m); 0 is
    # KL(p_t | p_s), 1 is KL(p_s | p_t).
    beta: float
    # Both models' logits are divided by it, but not in the cross-entropy; its square keeps the size
    # of the gradients (Hinton et al. 2015, arXiv 1503.02531).
    temperature: float = 1.0
    # From 0 to 1.
    cross_entropy_share: float = 0.0


class Sums(NamedTuple):
    """Sums over the tokens: the loss, with a graph; the divergence with its temperature^2, the
    cross-entropy, and the tokens where both models' likeliest one is the same, detached.
    """

    total: torch.Tensor
    divergence: torch.Tensor
    cross_entropy: torch.Tensor
    agreement: torch.Tensor


def frozen_factors(model: nn.Module, batch: MicroBatch) -> Factors:
    """What a frozen model's logits of each trained token are made of, after its forward pass.

    FSDP gives the output head up at the end of the pass; it is copied, so that it can be used in
    the pass of another model.

    Args:
        model: a Decoder.
        batch: on the model's device.
    """

    def kept(made_of: Factors) -> Factors:
        if not isinstance(model, FSDPModule):
            return made_of
        return made_of._replace(pairs=[(rows, weight.clone()) for rows, weight in made_of.pairs])

    return through_head(model, batch, kept)


def distillation_loss(
    student: Factors, teacher: Factors, targets: torch.Tensor, how: Divergence
) -> Sums:
    """The loss over all tokens, in fp32 (fp64 for fp64 inputs); 0 with zero gradients for none.

    Of vocabularies that differ in length only the common first part counts, also in the
    cross-entropy.

    Args:
        teacher: of the same tokens; without gradients.
        targets: int64 [tokens], numbers of the common vocabulary.

    Raises:
        ConfigError: a rank has no columns of the common vocabulary.
    """
    begin, caps, ranks = student.begin, (student.softcap, teacher.softcap), student.ranks
    differ = student.width != teacher.width
    student = first_columns(student, ranks * min(student.width, teacher.width))
    if differ:
        # The parts of the teacher's begin elsewhere.
        here = slice(begin, begin + student.width)
        pairs = [(x, _gathered(weight, student.group)[here]) for x, weight in teacher.pairs]
        teacher = teacher._replace(pairs=pairs)
    rows = (*own_columns(targets - begin, student.width), teacher)
    share = how.cross_entropy_share
    settings = (how, caps, student.group, begin)
    total, sums = Loss(_chunk, rows, settings, (1 - share, share, 0.0)).summed(student)
    return Sums(total, *sums)


def first_columns(made_of: Factors, vocabulary: int) -> Factors:
    """This rank's columns of the first `vocabulary` tokens, in the chunks of all of them.

    Raises:
        ConfigError: there are none.
    """
    begin, ranks = made_of.begin, made_of.ranks
    if vocabulary <= (ranks - 1) * made_of.width:
        raise ConfigError(
            f"teacher: the vocabularies of student and teacher, {ranks * made_of.width} and "
            f"{vocabulary} tokens, are too different to be split over {ranks} GPUs; lower "
            "tensor_parallel_dim"
        )
    if begin + made_of.width <= vocabulary:
        return made_of
    chunks = len(list(made_of.parts()))
    pairs = [(rows, weight[: vocabulary - begin]) for rows, weight in made_of.pairs]
    return made_of._replace(pairs=pairs, chunks=chunks)


def _gathered(weight: torch.Tensor, group: Group) -> torch.Tensor:
    if group is None:
        return weight
    whole = weight.new_empty(group.size() * weight.shape[0], *weight.shape[1:])
    dist.all_gather_into_tensor(whole, weight.contiguous(), group)
    return whole


def _chunk(
    student: torch.Tensor,
    rows: list[Any],
    slope_wanted: bool,
    settings: tuple[Divergence, tuple[float | None, float | None], Group, int],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Figures [3, tokens] of [tokens, vocabulary] logits, which may be overwritten.

    They are the divergence times temperature^2, the cross-entropy and the agreement. The
    number of tensors of the logits' size that are kept bounds a chunk's memory.
    """
    dtype, (how, caps, group, begin) = student.dtype, settings
    heat, share = how.temperature, how.cross_entropy_share
    student, tanh = capped(student, caps[0])
    # Taken out: once they are made exact nothing must hold them.
    teacher = capped(rows.pop(), caps[1])[0]
    highest, likeliest = highest_of([student.max(1), teacher.max(1)], group, begin)
    agreement = likeliest[:, 0] == likeliest[:, 1]
    columns, held = rows[0].unsqueeze(1), rows[1].to(student.dtype).unsqueeze(1)
    student -= highest[:, :1]
    chosen = student.gather(1, columns) * held
    plain = student.exp().sum(1, keepdim=True)
    student /= heat
    teacher = teacher.sub_(highest[:, 1:]).div_(heat)
    warm = plain if heat == 1 else student.exp().sum(1, keepdim=True)
    sums = torch.cat([plain, warm, teacher.exp().sum(1, keepdim=True), chosen], 1)
    plain, warm, other, chosen = over_ranks(sums, group).split(1, 1)
    # Log-probabilities of both.
    student -= warm.log()
    teacher -= other.log()
    value, slope = _divergence(student, teacher, how.beta, group)
    cross_entropy = plain.log() - chosen
    figures = [heat**2 * value, cross_entropy.squeeze(1), agreement.to(value.dtype)]
    if not slope_wanted:
        return torch.stack(figures), None
    slope *= (1 - share) * heat
    if share:
        probabilities = student.add_(warm.log()).mul_(heat).sub_(plain.log()).exp_()
        slope += probabilities.scatter_add_(1, columns, -held).mul_(share)
    if tanh is not None:
        slope *= tanh.square_().neg_().add_(1)
    return torch.stack(figures), slope.to(dtype)


def _divergence(
    student: torch.Tensor,
    teacher: torch.Tensor,
    beta: float,
    group: Group,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens], and its gradient by the logits, of log-probabilities [tokens, vocabulary].

    The teacher's are overwritten, the student's are not.
    """
    if beta == 0:
        target = teacher.exp()
        value = teacher.sub_(student).mul_(target).sum(1)
        return over_ranks(value, group), student.exp().sub_(target)
    # log p_t - log p_s, and log p_s - log m.
    apart = teacher.sub_(student)
    if beta == 1:
        value, surplus = torch.zeros_like(apart[:, 0]), -apart
    else:
        odds = math.log(beta) - math.log1p(-beta)
        # In fp64 1 + e^40 is e^40, too.
        surplus = F.softplus(apart + odds, threshold=40.0).add_(math.log1p(-beta)).neg_()
        target = (student + apart).exp_()
        value = beta * apart.add_(surplus).mul_(target).sum(1)
        del target
    own = 1.0 if beta == 1 else 1 - beta
    probabilities = student.exp()
    both = torch.stack([value, torch.mul(probabilities, surplus, out=apart).sum(1)])
    value, inner = over_ranks(both, group).unbind(0)
    slope = probabilities.mul_(surplus.sub_(inner.unsqueeze(1))).mul_(own)
    return value + own * inner, slope


def highest_of(
    of_rank: Sequence[Any], group: Group, begin: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest logit of each token, and whose it is, both [tokens, len(of_rank)].

    Args:
        of_rank: of one model each, values and indices of `max` over this rank's columns.
    """
    highest = torch.stack([values for values, _ in of_rank], 1)
    index = torch.stack([indices for _, indices in of_rank], 1) + begin
    if group is not None:
        own, highest = highest, over_ranks(highest.clone(), group, dist.ReduceOp.MAX)
        index = index.where(own == highest, torch.iinfo(torch.int64).max)
        over_ranks(index, group, dist.ReduceOp.MIN)
    return highest, index
