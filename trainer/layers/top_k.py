"""A teacher's distributions as top-k tokens and one tail bucket: made, and learnt from, in chunks.

The tail bucket is all tokens outside the top k taken as one. The forward KL over top k and tail is
that over the whole vocabulary less the tail's mass times the KL within the tail, so never more.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from trainer.errors import ConfigError
from trainer.layers.batch import TopK
from trainer.layers.divergence import Divergence, Sums, highest_of, own_columns, sums_of
from trainer.layers.log_probs import Factors, capped, logits_of


def top_k(
    teacher: Factors, k: int, vocabulary: int, temperature: float = 1.0, chunks: int | None = None
) -> TopK:
    """The top k and the tail of softmax(logits / temperature), without [tokens, vocabulary] logits.

    Over a split vocabulary each rank gets all results.

    Args:
        k: all tokens if they are fewer.
        vocabulary: how many tokens count, from the first on.
        chunks: how many chunks the tokens go through in; None as in `linear_log_probs`.
    """
    tensors, size = teacher.tensors, teacher.chunk_tokens(chunks)
    count = len(tensors[0])
    if not count:
        values = tensors[0].new_empty(0, min(k, vocabulary), dtype=torch.float32)
        return TopK(values.int(), values, values.sum(1))
    begin = 0 if teacher.group is None else dist.get_rank(teacher.group) * len(tensors[1])
    parts = [
        _top_k(
            logits_of(tensors, slice(first, first + size)),
            teacher,
            min(k, vocabulary),
            begin,
            vocabulary,
            temperature,
        )
        for first in range(0, count, size)
    ]
    return TopK(*(torch.cat(each) for each in zip(*parts, strict=True)))


def _top_k(
    logits: torch.Tensor, teacher: Factors, k: int, begin: int, vocabulary: int, temperature: float
) -> TopK:
    group = teacher.group
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = capped(logits, teacher.softcap)[0].div_(temperature)
    logits[:, max(0, vocabulary - begin) :] = -torch.inf
    values, ids = logits.topk(min(k, logits.shape[1]))
    highest = values[:, :1].clone()
    if group is not None:
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
    # A sum over the others: the difference to the whole would have few digits, or none.
    rest = logits.sub_(highest).exp_().scatter_(1, ids, 0.0).sum(1)
    values, ids = values - highest, ids + begin
    if group is not None:
        dist.all_reduce(rest, group=group)
        offered = gathered(values, group)
        values, index = offered.topk(k)
        ids = gathered(ids, group).gather(1, index)
        rest += offered.exp().scatter_(1, index, 0.0).sum(1)
    log_sum = (values.exp().sum(1) + rest).log()
    return TopK(ids.int(), values - log_sum.unsqueeze(1), rest.log() - log_sum)


def gathered(columns: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The columns [tokens, n] of all ranks side by side, in rank order."""
    parts = columns.new_empty(group.size(), *columns.shape)
    dist.all_gather_into_tensor(parts.flatten(0, 1), columns.contiguous(), group)
    return parts.transpose(0, 1).flatten(1)


def top_k_loss(
    student: Factors,
    teacher: TopK,
    targets: torch.Tensor,
    how: Divergence,
    vocabulary: int,
    *,
    chunks: int | None = None,
) -> Sums:
    """As `distillation_loss` with beta 0, with top k and tail in the place of the teacher's logits.

    Args:
        teacher: of the same tokens, at the temperature of `how`.
        targets: int64 [tokens].
        vocabulary: how many tokens count, from the first on.

    Raises:
        ConfigError: a rank has no columns of these.
    """
    size = student.chunk_tokens(chunks)
    student, begin = _cut(student, vocabulary)
    columns, held = own_columns(targets - begin, student.pairs[0][1].shape[0])

    def one_chunk(tensors: Sequence[torch.Tensor], part: slice, slope_wanted: bool, _: Any) -> Any:
        return _chunk(
            logits_of(tensors, part),
            TopK(*(each[part] for each in teacher)),
            columns[part],
            held[part],
            how,
            student,
            begin,
            slope_wanted,
        )

    return sums_of(student, len(targets), size, how.cross_entropy_share, one_chunk)


def _cut(student: Factors, vocabulary: int) -> tuple[Factors, int]:
    """The student over the tokens that count, and which of them is this rank's first."""
    own, group = student.pairs[0][1].shape[0], student.group
    ranks, rank = (1, 0) if group is None else (group.size(), dist.get_rank(group))
    if vocabulary <= (ranks - 1) * own:
        raise ConfigError(
            f"teacher: the vocabularies of student and teacher, {ranks * own} and {vocabulary} "
            f"tokens, are too different to be split over {ranks} GPUs; lower tensor_parallel_dim"
        )
    begin = rank * own
    if begin + own <= vocabulary:
        return student, begin
    pairs = [(rows, weight[: vocabulary - begin]) for rows, weight in student.pairs]
    return student._replace(pairs=pairs), begin


def _chunk(
    student: torch.Tensor,
    teacher: TopK,
    columns: torch.Tensor,
    held: torch.Tensor,
    how: Divergence,
    made_of: Factors,
    begin: int,
    slope_wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Figures [3, tokens] and the gradient by the logits [tokens, vocabulary], as divergence has.

    With e = exp(logits / temperature), E their sum and R that of the tail, the gradient by
    logits / temperature is e_j / E - p_j at a top token, and e_j / E - e_j / R * p_tail elsewhere.
    """
    dtype, group = student.dtype, made_of.group
    heat, share = how.temperature, how.cross_entropy_share
    exact = torch.promote_types(dtype, torch.float32)
    student, tanh = capped(student.to(exact), made_of.softcap)
    highest, likeliest = highest_of([student.max(1)], group, begin)
    agreement = likeliest[:, 0] == teacher.ids[:, 0]
    columns, held = columns.unsqueeze(1), held.to(exact).unsqueeze(1)
    top, inside = own_columns(teacher.ids.long() - begin, student.shape[1])
    student -= highest
    chosen = student.gather(1, columns) * held
    # The same as the exponentials below at temperature 1.
    cold = None if heat == 1 else student.exp()
    plain = None if cold is None else cold.sum(1, keepdim=True)
    student /= heat
    logits = student.gather(1, top) * inside
    student.exp_()
    # Of the exponentials only the tail's stay: x - x is 0, and nothing is taken where not inside.
    student.scatter_add_(1, top, -(student.gather(1, top) * inside))
    sums = [student.sum(1, keepdim=True), chosen, logits]
    sums = torch.cat(sums if plain is None else [*sums, plain], 1)
    if group is not None:
        dist.all_reduce(sums, group=group)
    rest, chosen, logits = sums[:, :1], sums[:, 1:2], sums[:, 2 : 2 + top.shape[1]]
    rest = rest.clamp_min(torch.finfo(exact).tiny)
    whole = rest + logits.exp().sum(1, keepdim=True)
    plain = whole if plain is None else sums[:, -1:]
    wanted, tail = teacher.log_probs.to(exact), teacher.tail.to(exact).unsqueeze(1)
    target, target_tail = wanted.exp(), tail.exp()
    value = (target * (wanted - logits + whole.log())).sum(1, keepdim=True)
    # Without a tail its log is -inf.
    value += torch.where(target_tail > 0, target_tail * (tail - rest.log() + whole.log()), 0.0)
    cross_entropy = plain.log() - chosen
    figures = torch.cat([heat**2 * value, cross_entropy, agreement.to(exact).unsqueeze(1)], 1).t()
    if not slope_wanted:
        return figures, None
    factor, mass = (1 - share) * heat, target.sum(1, keepdim=True) + target_tail
    of_tail, own = factor * (mass / whole - target_tail / rest), logits.exp() / whole
    of_top = factor * (mass * own - target)
    if cold is None:
        of_tail, of_top = of_tail + share / whole, of_top + share * own
    slope = student.mul_(of_tail).scatter_add_(1, top, of_top * inside)
    if cold is not None:
        slope += cold.mul_(share / plain)
    slope.scatter_add_(1, columns, -share * held)
    if tanh is not None:
        slope *= tanh.square_().neg_().add_(1)
    return figures, slope.to(dtype)


def sampled_errors(
    teacher: Factors, kept: TopK, vocabulary: int, temperature: float, tokens: int
) -> torch.Tensor:
    """Sums over the first tokens, by which the error of what is kept is known; fp64 [4].

    They are the number of tokens, the mass of the tail, and the forward KL from the teacher to a
    student whose logits are the teacher's plus normal noise of deviation 1, over the whole
    vocabulary and over top k and tail.

    Args:
        tokens: the maximum number of tokens whose logits are in memory.
    """
    logits = logits_of(teacher.tensors, slice(tokens)).float()
    if teacher.group is not None:
        logits = gathered(logits, teacher.group)
    logits = capped(logits, teacher.softcap)[0][:, :vocabulary].div_(temperature)
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    student = torch.log_softmax(logits + noise.to(logits.device), 1)
    logits = torch.log_softmax(logits, 1)
    whole = (logits.exp() * (logits - student)).sum(1)
    ids, log_probs, tail = (each[:tokens] for each in kept)
    top = student.gather(1, ids.long())
    rest = student.scatter(1, ids.long(), -torch.inf).logsumexp(1)
    over = (log_probs.exp() * (log_probs - top)).sum(1)
    over += torch.where(tail > -torch.inf, tail.exp() * (tail - rest), 0.0)
    count = tail.new_tensor(len(tail))
    return torch.stack([count, tail.exp().sum(), whole.sum(), over.sum()]).double().cpu()
