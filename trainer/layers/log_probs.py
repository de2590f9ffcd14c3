"""Log-probabilities of target tokens straight from hidden states: logits never exist as a whole.

Tokens go through the output head in chunks, as in Liger Kernel (arXiv 2410.10989). torch 2.13's own
`linear_cross_entropy` does the same; it is not used, because it gives the sum in the weights' dtype
(4704 for 4740.3 in bf16), and takes neither a split vocabulary nor LoRA.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from runspec.step import loss_tokens
from trainer.errors import ConfigError
from trainer.layers.adapters.base import AdaptedLinear
from trainer.layers.batch import MicroBatch
from trainer.layers.linear import own_part
from trainer.parallel.activations import compiled
from trainer.parallel.sharded import local

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class Factors(NamedTuple):
    """What a model's logits are made of.

    pairs: (input [tokens, k], weight [this rank's vocabulary, k]), whose products add up to the
    logits. group: the ranks that the vocabulary is split over, in equal parts in rank order; None
    if it is whole. softcap: logits become softcap * tanh(logits / softcap).
    """

    pairs: Pairs
    group: dist.ProcessGroup | None = None
    softcap: float | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Inputs and weights in turn."""
        return [tensor for pair in self.pairs for tensor in pair]

    @property
    def wanted(self) -> list[bool]:
        """Of which of the tensors a gradient is wanted; only these get a buffer for one."""
        return [torch.is_grad_enabled() and tensor.requires_grad for tensor in self.tensors]

    def chunk_tokens(self, chunks: int | None = None) -> int:
        """How many tokens go through the head at a time; `chunks`: see `linear_log_probs`."""
        rows, weight = self.pairs[0]
        return loss_tokens(len(rows), len(weight), weight.shape[1], chunks)

    def tempered(self, temperature: float) -> "Factors":
        """What the logits divided by `temperature` are made of; without a softcap only."""
        pairs = [(inputs / temperature, weight) for inputs, weight in self.pairs]
        return self if temperature == 1 else self._replace(pairs=pairs)


def factors(model: nn.Module, hidden: torch.Tensor, positions: torch.Tensor) -> Factors:
    """Return what the logits at some positions are made of, to be called in a Decoder's `output`.

    Under FSDP the output head's weight is whole only inside the model's forward pass.

    Args:
        hidden: the last block's output, [batch, sequence, dim].
        positions: int64 [tokens], indices into the flattened batch.

    Raises:
        ConfigError: the output head is of a kind that is not known.
    """
    rows = model.final_norm(hidden).flatten(0, 1).index_select(0, positions)
    if model.output_multiplier is not None:
        rows = rows * model.output_multiplier
    head = model.output_head
    weight = model.embedding.weight if head is None else head.weight
    pairs = [(rows, local(weight))]
    added = head.factors(rows, own_part(head)) if isinstance(head, AdaptedLinear) else []
    if added is not None:
        pairs += added
    known = isinstance(head, nn.Linear | AdaptedLinear | None) and added is not None
    if not known or getattr(head, "bias", None) is not None:
        raise ConfigError(
            f"loss: a loss without logits knows no output head of kind {type(head).__name__}; "
            "set loss._component_=torchtune.modules.loss.CEWithChunkedOutputLoss"
        )
    group = weight.device_mesh.get_group() if isinstance(weight, DTensor) else None
    return Factors(pairs, group, model.output_softcap)


def head_faults(block: Mapping[str, Any], instead: str) -> list[str]:
    """Why `factors` cannot take the output head of the model that a `model` block names.

    Args:
        instead: what else the config may say.
    """
    named = "lm_head" in (block.get("lora_modules") or ())
    if block.get("use_dora") and (named or block.get("apply_lora_to_output")):
        remedy = "leave lm_head out of model.lora_modules" if named else "set "
        remedy += "" if named else "model.apply_lora_to_output=False"
        return [f"loss: a loss without logits knows no DoRA on the output head; {remedy}{instead}"]
    return []


def linear_log_probs(
    made_of: Factors,
    targets: torch.Tensor,
    *,
    chunks: int | None = None,
    compile_chunks: bool = False,
) -> torch.Tensor:
    """log softmax(logits)[target] of each token, for logits = sum of input @ weight.T.

    The backward pass computes the logits of each chunk again, because the gradients depend on what
    is made of the results. Over a split vocabulary each rank gets all results; the gradient of an
    input is then partial.

    Args:
        targets: int64 [tokens], numbers of the whole vocabulary.
        chunks: how many chunks the tokens go through in; None makes a chunk's logits about as large
            as the hidden states, and not smaller than 512 tokens' logits.
        compile_chunks: make few kernels of what is done to the logits, if the vocabulary is whole.

    Returns:
        [tokens], fp32 (fp64 for fp64 inputs).
    """
    return _LogProbs.apply(_plan(made_of, targets, chunks, compile_chunks), *made_of.tensors)


def token_log_probs(
    model: nn.Module,
    batch: MicroBatch,
    *,
    temperature: float = 1.0,
    compile_chunks: bool = False,
) -> torch.Tensor:
    """The log-probability of each trained token of a batch, in a forward pass without logits.

    Args:
        model: a Decoder that is asked for no logits (num_output_chunks 1).
        batch: on the model's device.
        temperature: the logits are divided by it; see `Factors.tempered`.

    Returns:
        [target_count], fp32, in the order of `batch.trained`; each rank of a split vocabulary has
        all of them.
    """
    targets = batch.labels.flatten().index_select(0, batch.trained)

    def output(model: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        made_of = factors(model, hidden, batch.trained).tempered(temperature)
        return linear_log_probs(made_of, targets, compile_chunks=compile_chunks)

    return model(batch.tokens, mask=batch.documents, input_pos=batch.positions, output=output)


def document_sums(values: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """The sum over each document's trained tokens of `values`, [target_count].

    Returns:
        [samples, documents per sample], in the dtype of `values`; 0 for a document without one.
    """
    sums = values.new_zeros(len(batch.lengths)).index_add(0, batch.document_index, values)
    return sums.view(-1, batch.documents_per_sample)


def linear_cross_entropy(
    made_of: Factors,
    targets: torch.Tensor,
    *,
    chunks: int | None = None,
    compile_chunks: bool = False,
) -> torch.Tensor:
    """-linear_log_probs(...).sum(), a scalar; 0 with zero gradients for no token.

    Every token's result has the same weight in the sum, so each chunk's gradients are made in the
    forward pass, and its logits are computed once. Weight gradients are summed over the chunks in
    fp32. Arguments and dtype are those of `linear_log_probs`.
    """
    return Summed.apply(_plan(made_of, targets, chunks, compile_chunks), *made_of.tensors)[0]


def cross_entropy_with_z_loss(
    made_of: Factors,
    targets: torch.Tensor,
    weight: float,
    *,
    compile_chunks: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`linear_cross_entropy` + weight * sum of log(Z)^2, Z the sum of a token's exp(logits).

    It keeps logits small (PaLM, arXiv 2204.02311, section 5).

    Returns:
        Both terms, and the second one alone, detached.
    """
    total, z_term = Summed.apply(
        _plan(made_of, targets, None, compile_chunks, weight), *made_of.tensors
    )
    return total, z_term


# From a head's inputs and weights in turn, some tokens, whether a gradient is wanted, and a factor
# of each token in it (None for 1) to figures [figures, tokens] and the loss's gradient by the
# logits, in their dtype.
Chunk = Callable[
    [Sequence[torch.Tensor], slice, bool, torch.Tensor | None], tuple[torch.Tensor, Any]
]


class Plan(NamedTuple):
    """How tokens go through an output head, in chunks of `size`.

    figures: how many there are of a token. total: from figures [figures, tokens] to the loss, and
    to what else is wanted of them. wanted: of which tensors of the head the gradient is.
    """

    tokens: int
    size: int
    figures: int
    chunk: Chunk
    total: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    wanted: list[bool]


def _plan(
    made_of: Factors,
    targets: torch.Tensor,
    chunks: int | None,
    compile_chunks: bool,
    z_loss: float = 0.0,
) -> Plan:
    group, softcap = made_of.group, made_of.softcap
    function = compiled_chunk(_chunk, 3) if compile_chunks and group is None else _chunk
    columns, held = own_columns(targets, len(made_of.pairs[0][1]), group)

    # No name and no tuple for the logits: once they are made exact nothing must hold them.
    def chunk(tensors: Any, part: slice, slope_wanted: bool, scale: torch.Tensor | None) -> Any:
        return function(
            logits_of(tensors, part),
            columns[part],
            held[part],
            group,
            softcap,
            slope_wanted,
            scale,
            z_loss,
        )

    def total(figures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs, log_sums = figures
        z_term, whole = z_loss * log_sums.square().sum(), -log_probs.sum()
        return whole + z_term if z_loss else whole, z_term

    size = made_of.chunk_tokens(chunks)
    return Plan(len(targets), size, 2, chunk, total, made_of.wanted)


class _LogProbs(torch.autograd.Function):
    """Gradients are made in the backward pass."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.plan = plan
        ctx.save_for_backward(*tensors)
        return _pass(plan._replace(wanted=[False] * len(tensors)), tensors)[0][0]

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *_pass(ctx.plan, ctx.saved_tensors, -upstream)[1]


class Summed(torch.autograd.Function):
    """A plan's total. Gradients are made in the forward pass; the backward pass scales them once.

    Its arguments are a Plan and the tensors of Factors.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        figures, ctx.gradients = _pass(plan, tensors)
        loss, others = plan.total(figures)
        ctx.mark_non_differentiable(others)
        return loss, others

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the backward pass of a loss without logits runs once only")
        gradients, ctx.gradients = ctx.gradients, None
        return None, *(None if g is None else g.mul_(upstream) for g in gradients)


def _pass(
    plan: Plan, tensors: Sequence[torch.Tensor], scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Figures [figures, tokens], and the loss's gradient for each wanted tensor.

    Args:
        scale: [tokens], a factor of each token in the loss; None for 1.
    """
    exact = torch.promote_types(tensors[0].dtype, torch.float32)
    figures = torch.empty(plan.figures, plan.tokens, dtype=exact, device=tensors[0].device)
    # A chunk writes its own rows of the inputs' gradients, and adds to all of the weights'.
    gradients = [
        torch.zeros_like(tensor, dtype=exact if index % 2 else None) if plan.wanted[index] else None
        for index, tensor in enumerate(tensors)
    ]

    # In a function of its own, so that a chunk's gradient is gone before the next one's is made.
    def one_chunk(part: slice) -> None:
        factor = None if scale is None else scale[part]
        figures[:, part], slope = plan.chunk(tensors, part, any(plan.wanted), factor)
        for index in range(0, len(tensors), 2):
            inputs, weight = tensors[index : index + 2]
            own, total = gradients[index : index + 2]
            if own is not None:
                torch.mm(slope, weight, out=own[part])
            if total is not None:
                add_product(total, slope.t(), inputs[part])

    for begin in range(0, plan.tokens, plan.size):
        one_chunk(slice(begin, begin + plan.size))
    return figures, [
        None if gradient is None else gradient.to(tensor.dtype)
        for gradient, tensor in zip(gradients, tensors, strict=True)
    ]


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right, where total may be in fp32 and the others in bf16."""
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    elif total.dtype == torch.float32 and _adds_products_in_fp32(total.device):
        torch.addmm(total, left, right, torch.float32, out=total)
    else:
        total += left @ right


@cache
def _adds_products_in_fp32(device: torch.device) -> bool:
    """Whether this torch adds a product of bf16 matrices to fp32 in one call: some do, on GPUs."""
    if device.type != "cuda":
        return False
    matrix = torch.eye(16, device=device, dtype=torch.bfloat16)
    total = torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, matrix, matrix, torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 1 + matrix.float()).all())


def own_columns(
    targets: torch.Tensor, vocabulary: int, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of this rank's columns each target is, and 1.0 if it is one of them, else 0.0."""
    if group is None:
        return targets, torch.ones_like(targets, dtype=torch.float32)
    own = targets - dist.get_rank(group) * vocabulary
    held = (own >= 0) & (own < vocabulary)
    return own.clamp(0, vocabulary - 1), held.float()


def logits_of(tensors: Sequence[torch.Tensor], part: slice) -> torch.Tensor:
    """The logits of some tokens, in memory of their own, from inputs and weights in turn."""
    logits = tensors[0][part] @ tensors[1].t()
    for index in range(2, len(tensors), 2):
        logits.addmm_(tensors[index][part], tensors[index + 1].t())
    return logits


def capped(logits: torch.Tensor, softcap: float | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits under a model's cap, and their tanh; the given ones may be overwritten."""
    if softcap is None:
        return logits, None
    tanh = logits.div_(softcap).tanh_()
    return softcap * tanh, tanh


def _chunk(
    logits: torch.Tensor,
    columns: torch.Tensor,
    held: torch.Tensor,
    group: dist.ProcessGroup | None,
    softcap: float | None,
    slope_wanted: bool,
    scale: torch.Tensor | None,
    z_loss: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities and log(Z), [2, tokens], of [tokens, vocabulary] logits.

    The logits may be overwritten. The results are in fp32, or fp64 for fp64 logits. The second one
    is the gradient of minus the sum of the log-probabilities, plus that of z_loss * log(Z)^2, in
    the logits' dtype; each token's is multiplied by its `scale`.
    """
    dtype = logits.dtype
    logits, tanh = capped(logits.to(torch.promote_types(dtype, torch.float32)), softcap)
    highest = logits.amax(1, keepdim=True)
    if group is not None:
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
    logits -= highest
    columns, held = columns.unsqueeze(1), held.to(logits.dtype).unsqueeze(1)
    chosen = logits.gather(1, columns)
    sums = torch.cat([logits.exp_().sum(1, keepdim=True), chosen * held], 1)
    if group is not None:
        dist.all_reduce(sums, group=group)
    log_sums = sums[:, 0].log()
    results = torch.stack([sums[:, 1] - log_sums, log_sums + highest[:, 0]])
    if not slope_wanted:
        return results, None
    slope, own = logits.div_(sums[:, :1]), chosen.exp() / sums[:, :1]
    if z_loss:
        factor = (1 + 2 * z_loss * results[1]).unsqueeze(1)
        slope, own = slope.mul_(factor), own * factor
    own = own - held
    if tanh is not None:
        own = own * (1 - tanh.gather(1, columns).square())
        slope *= tanh.square_().neg_().add_(1)
    if scale is not None:
        own, slope = own * scale.unsqueeze(1), slope.mul_(scale.unsqueeze(1))
    # Each number is rounded once; the terms of the target's would cancel out in fewer digits.
    return results, slope.to(dtype).scatter_(1, columns, own.to(dtype))


@cache
def compiled_chunk(function: Callable[..., Any], tensors: int) -> Callable[..., Any]:
    """A compiled function whose first arguments, this many, are tensors of a chunk's tokens."""
    quick = compiled(function)

    def chunk(*arguments: Any) -> Any:
        # How many tokens are trained changes with each batch.
        for tensor in arguments[:tensors]:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return quick(*arguments)

    return chunk
