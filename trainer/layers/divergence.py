"""The distillation loss of a student and a teacher straight from hidden states, chunk by chunk.

Tokens go through both output heads in chunks, as in trainer.layers.log_probs, and each chunk's
gradients are made in the forward pass, so that neither model's logits ever exist as a whole.
"""

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
from trainer.layers.log_probs import (
    Chunk,
    Factors,
    Plan,
    Summed,
    capped,
    compiled_chunk,
    factors,
    logits_of,
)


class Divergence(NamedTuple):
    """Which loss: (1 - share) * temperature^2 * divergence + share * cross-entropy.

    beta: generalised Jensen-Shannon divergence (Agarwal et al. 2023, arXiv 2306.13649): with
    m = beta * p_t + (1 - beta) * p_s it is beta * KL(p_t | m) + (1 - beta) * KL(p_s | m); 0 is
    KL(p_t | p_s), 1 is KL(p_s | p_t). temperature: both models' logits are divided by it, but not
    in the cross-entropy; its square keeps the size of the gradients (Hinton et al. 2015, arXiv
    1503.02531). cross_entropy_share: from 0 to 1.
    """

    beta: float
    temperature: float = 1.0
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
        model: a Decoder that is asked for no logits (num_output_chunks 1).
        batch: on the model's device.
    """

    def output(model: nn.Module, hidden: torch.Tensor) -> Factors:
        made_of = factors(model, hidden, batch.trained)
        if not isinstance(model, FSDPModule):
            return made_of
        return made_of._replace(pairs=[(rows, weight.clone()) for rows, weight in made_of.pairs])

    return model(batch.tokens, mask=batch.documents, input_pos=batch.positions, output=output)


def distillation_loss(
    student: Factors,
    teacher: Factors,
    targets: torch.Tensor,
    how: Divergence,
    *,
    chunks: int | None = None,
    compile_chunks: bool = False,
) -> Sums:
    """The loss over all tokens, in fp32 (fp64 for fp64 inputs); 0 with zero gradients for none.

    Of vocabularies that differ in length only the common first part counts, also in the
    cross-entropy. Over a split vocabulary each rank gets all results; the gradient of an input is
    then partial.

    Args:
        teacher: of the same tokens; without gradients.
        targets: int64 [tokens], numbers of the common vocabulary.
        chunks: how many chunks the tokens go through in; None as in `linear_log_probs`.
        compile_chunks: make few kernels of what is done to the logits, if the vocabulary is whole.

    Raises:
        ConfigError: a rank has no columns of the common vocabulary.
    """
    size = student.chunk_tokens(chunks)
    student, teacher, begin = _aligned(student, teacher)
    caps = (student.softcap, teacher.softcap)
    function = compiled_chunk(_chunk, 4) if compile_chunks and student.group is None else _chunk
    frozen = teacher.tensors
    columns, held = own_columns(targets - begin, student.pairs[0][1].shape[0])

    # No name and no tuple for the logits: once they are made exact nothing must hold them.
    def one_chunk(tensors: Sequence[torch.Tensor], part: slice, slope_wanted: bool, _: Any) -> Any:
        return function(
            logits_of(tensors, part),
            logits_of(frozen, part),
            columns[part],
            held[part],
            how,
            caps,
            student.group,
            begin,
            slope_wanted,
        )

    return sums_of(student, len(targets), size, how.cross_entropy_share, one_chunk)


def sums_of(student: Factors, tokens: int, size: int, share: float, chunk: Chunk) -> Sums:
    """The sums over tokens that go through the student's output head in chunks of `size`.

    Args:
        share: of the cross-entropy in the loss.
        chunk: its figures are the divergence, the cross-entropy and the agreement.
    """

    def total(figures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sums = figures.sum(1)
        return (1 - share) * sums[0] + share * sums[1], sums

    plan = Plan(tokens, size, 3, chunk, total, student.wanted)
    loss, sums = Summed.apply(plan, *student.tensors)
    return Sums(loss, *sums)


def own_columns(columns: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of columns as this rank's, of which it has `width`, and whether they are its own."""
    held = (columns >= 0) & (columns < width)
    return columns.clamp(0, width - 1), held


def _aligned(student: Factors, teacher: Factors) -> tuple[Factors, Factors, int]:
    """Both over the same columns, and which of the vocabulary is the first of this rank's."""
    own, other = (made_of.pairs[0][1].shape[0] for made_of in (student, teacher))
    group = student.group
    ranks, rank = (1, 0) if group is None else (group.size(), dist.get_rank(group))
    begin = rank * own
    if own == other:
        return student, teacher, begin
    common = ranks * min(own, other)
    if common <= (ranks - 1) * own:
        raise ConfigError(
            f"teacher: the vocabularies of student and teacher, {ranks * own} and {ranks * other} "
            f"tokens, are too different to be split over {ranks} GPUs; lower tensor_parallel_dim"
        )
    end = min(begin + own, common)

    def cut(made_of: Factors, first: int, split: bool) -> Factors:
        whole = [(x, _gathered(w, group) if split else w) for x, w in made_of.pairs]
        return made_of._replace(pairs=[(x, w[first : first + end - begin]) for x, w in whole])

    # The parts of the teacher's begin elsewhere.
    return cut(student, 0, False), cut(teacher, begin, True), begin


def _gathered(weight: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is None:
        return weight
    whole = weight.new_empty(group.size() * weight.shape[0], *weight.shape[1:])
    dist.all_gather_into_tensor(whole, weight.contiguous(), group)
    return whole


def _chunk(
    student: torch.Tensor,
    teacher: torch.Tensor,
    columns: torch.Tensor,
    held: torch.Tensor,
    how: Divergence,
    caps: tuple[float | None, float | None],
    group: dist.ProcessGroup | None,
    begin: int,
    slope_wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Figures [3, tokens] of [tokens, vocabulary] logits, which may be overwritten.

    They are the divergence times temperature^2, the cross-entropy and the agreement. The second
    result is the loss's gradient by the student's logits, in their dtype. The comments say what is
    held: tensors of the logits' size that are in memory at once; it bounds a chunk's size.
    """
    dtype, heat, share = student.dtype, how.temperature, how.cross_entropy_share
    exact = torch.promote_types(dtype, torch.float32)
    student, tanh = capped(student.to(exact), caps[0])
    teacher = capped(teacher.to(exact), caps[1])[0]
    highest, likeliest = highest_of([student.max(1), teacher.max(1)], group, begin)
    agreement = likeliest[:, 0] == likeliest[:, 1]
    columns, held = columns.unsqueeze(1), held.to(exact).unsqueeze(1)
    student -= highest[:, :1]
    chosen = student.gather(1, columns) * held
    plain = student.exp().sum(1, keepdim=True)
    student /= heat
    teacher = teacher.sub_(highest[:, 1:]).div_(heat)
    warm = plain if heat == 1 else student.exp().sum(1, keepdim=True)
    sums = torch.cat([plain, warm, teacher.exp().sum(1, keepdim=True), chosen], 1)
    if group is not None:
        dist.all_reduce(sums, group=group)
    plain, warm, other, chosen = sums.split(1, 1)
    # Log-probabilities of both.
    student -= warm.log()
    teacher -= other.log()
    value, slope = _divergence(student, teacher, how.beta, group)
    cross_entropy = plain.log() - chosen
    figures = torch.stack([heat**2 * value, cross_entropy.squeeze(1), agreement.to(exact)])
    if not slope_wanted:
        return figures, None
    slope *= (1 - share) * heat
    if share:
        probabilities = student.add_(warm.log()).mul_(heat).sub_(plain.log()).exp_()
        slope += probabilities.scatter_add_(1, columns, -held).mul_(share)
    if tanh is not None:
        slope *= tanh.square_().neg_().add_(1)
    return figures, slope.to(dtype)


def _divergence(
    student: torch.Tensor,
    teacher: torch.Tensor,
    beta: float,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens], and its gradient by the logits, of log-probabilities [tokens, vocabulary].

    The teacher's are overwritten, the student's are not.
    """
    if beta == 0:
        target = teacher.exp()
        value = teacher.sub_(student).mul_(target).sum(1)
        return _total(value, group), student.exp().sub_(target)
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
    both = _total(torch.stack([value, torch.mul(probabilities, surplus, out=apart).sum(1)]), group)
    value, inner = both.unbind(0)
    slope = probabilities.mul_(surplus.sub_(inner.unsqueeze(1))).mul_(own)
    return value + own * inner, slope


def _total(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is not None:
        dist.all_reduce(values, group=group)
    return values


def highest_of(
    of_rank: Sequence[Any], group: dist.ProcessGroup | None, begin: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest logit of each token, and whose it is, both [tokens, len(of_rank)].

    Args:
        of_rank: of one model each, values and indices of `max` over this rank's columns.
    """
    highest = torch.stack([values for values, _ in of_rank], 1)
    index = torch.stack([indices for _, indices in of_rank], 1) + begin
    if group is not None:
        local = highest.clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        index = index.where(local == highest, torch.iinfo(torch.int64).max)
        dist.all_reduce(index, dist.ReduceOp.MIN, group)
    return highest, index
