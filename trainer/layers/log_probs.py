"""Log-probabilities of target tokens, and cross-entropy, by chunks of the output head."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.layers.batch import MicroBatch
from trainer.layers.head import Factors, Group, Loss, capped, over_ranks, own_columns, through_head


def linear_log_probs(made_of: Factors, targets: torch.Tensor) -> torch.Tensor:
    """log softmax(logits)[target] of each token, for logits = sum of input @ weight.T.

    Args:
        targets: int64 [tokens], numbers of the whole vocabulary.

    Returns:
        [tokens], fp32 (fp64 for fp64 inputs).
    """
    return _loss(made_of, targets).per_token(made_of)


def token_log_probs(model: nn.Module, batch: MicroBatch, temperature: float = 1.0) -> torch.Tensor:
    """The log-probability of each trained token of a batch, in a forward pass without logits.

    Args:
        model: a Decoder.
        batch: on the model's device.
        temperature: the logits are divided by it; other than 1 without a soft cap only.

    Returns:
        [target_count], fp32, in the order of `batch.trained`; each rank of a split vocabulary has
        all of them.
    """

    def tempered(made_of: Factors) -> torch.Tensor:
        if temperature != 1:
            pairs = [(inputs / temperature, weight) for inputs, weight in made_of.pairs]
            made_of = made_of._replace(pairs=pairs)
        return linear_log_probs(made_of, batch.targets)

    return through_head(model, batch, tempered)


def document_sums(values: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """The sum over each document's trained tokens of `values`, [target_count].

    Returns:
        [samples, documents per sample], in the dtype of `values`; 0 for a document without one.
    """
    sums = values.new_zeros(len(batch.lengths)).index_add(0, batch.document_index, values)
    return sums.view(-1, batch.documents_per_sample)


def linear_cross_entropy(
    made_of: Factors, targets: torch.Tensor, label_smoothing: float = 0.0
) -> torch.Tensor:
    """-linear_log_probs(...).sum(), a scalar; 0 with zero gradients for no token.

    Args:
        label_smoothing: the share of the target that all tokens have alike, as in
            torch.nn.functional.cross_entropy.
    """
    return _loss(made_of, targets, smoothing=label_smoothing).summed(made_of)[0]


def cross_entropy_with_z_loss(
    made_of: Factors, targets: torch.Tensor, weight: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`linear_cross_entropy` + weight * sum of log(Z)^2, Z the sum of a token's exp(logits).

    It keeps logits small (PaLM, arXiv 2204.02311, section 5).

    Returns:
        Both terms, and the second one alone, detached.
    """
    total, sums = _loss(made_of, targets, weight).summed(made_of)
    return total, weight * sums[1]


def _loss(
    made_of: Factors, targets: torch.Tensor, z_loss: float = 0.0, smoothing: float = 0.0
) -> Loss:
    rows = (*own_columns(targets - made_of.begin, made_of.width), None)
    # A token's share of the smoothing, and all of them.
    even = smoothing / (made_of.width * made_of.ranks), smoothing
    return Loss(_chunk, rows, (made_of.group, made_of.softcap, z_loss, even), (-1.0, z_loss))


def _chunk(
    logits: torch.Tensor,
    rows: list[Any],
    slope_wanted: bool,
    settings: tuple[Group, float | None, float, tuple[float, float]],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities and log(Z)^2, [2, tokens], of [tokens, vocabulary] logits.

    The gradient is that of minus the sum of the log-probabilities, plus that of z_loss * log(Z)^2;
    each token's is multiplied by its factor, the last of the rows, if there is one.
    """
    dtype, (group, softcap, z_loss, (even, smoothing)) = logits.dtype, settings
    logits, tanh = capped(logits, softcap)
    columns, held, factor = rows
    highest = over_ranks(logits.amax(1, keepdim=True), group, dist.ReduceOp.MAX)
    logits -= highest
    columns, held = columns.unsqueeze(1), held.to(logits.dtype).unsqueeze(1)
    chosen = logits.gather(1, columns)
    target = chosen * held
    if smoothing:
        target = (1 - smoothing) * target + even * logits.sum(1, keepdim=True)
    sums = torch.cat([logits.exp_().sum(1, keepdim=True), target], 1)
    whole, target = over_ranks(sums, group).split(1, 1)
    log_sums = whole.log()
    log_z = log_sums + highest
    results = torch.cat([target - log_sums, log_z.square()], 1).t()
    if not slope_wanted:
        return results, None
    slope, own = logits.div_(whole), chosen.exp() / whole
    if z_loss:
        surplus = 1 + 2 * z_loss * log_z
        slope, own = slope.mul_(surplus), own * surplus
    own = own - held
    if smoothing:
        slope, own = slope.sub_(even), own + smoothing * held - even
    if tanh is not None:
        own = own * (1 - tanh.gather(1, columns).square())
        slope *= tanh.square_().neg_().add_(1)
    if factor is not None:
        own, slope = own * factor.unsqueeze(1), slope.mul_(factor.unsqueeze(1))
    # Each number is rounded once; the terms of the target's would cancel out in fewer digits.
    return results, slope.to(dtype).scatter_(1, columns, own.to(dtype))
