"""One pass over the output head in chunks, straight from hidden states, for every loss.

Logits never exist as a whole: tokens go through the head in chunks, as in Liger Kernel (arXiv
2410.10989), and a loss is a function of one chunk's logits that gives figures of each token and
their gradient. torch 2.13's own `linear_cross_entropy` is not used, because it gives the sum in the
weights' dtype (4704 for 4740.3 in bf16), and takes neither a split vocabulary nor LoRA.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from runspec.step import loss_tokens
from trainer.errors import ConfigError
from trainer.layers.batch import MicroBatch
from trainer.layers.linear import AdaptedLinear, own_part
from trainer.layers.patch import compiled
from trainer.sharded import local

T = TypeVar("T")
Group: TypeAlias = dist.ProcessGroup | None


class Factors(NamedTuple):
    """What a model's logits are made of."""

    # (input [tokens, k], weight [this rank's vocabulary, k]), whose products add up to the logits.
    pairs: list[tuple[torch.Tensor, torch.Tensor]]
    # The ranks that the vocabulary is split over, in equal parts in rank order; None: it is whole.
    group: Group = None
    # Logits become softcap * tanh(logits / softcap).
    softcap: float | None = None
    # How many chunks the tokens go through in; None: see runspec.step.loss_tokens.
    chunks: int | None = None
    # Few kernels are made of what is done to the logits, if the vocabulary is whole.
    compiled: bool = False

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Inputs and weights in turn."""
        return [tensor for pair in self.pairs for tensor in pair]

    @property
    def width(self) -> int:
        """How many columns of the vocabulary this rank has."""
        return len(self.pairs[0][1])

    @property
    def ranks(self) -> int:
        """How many ranks the vocabulary is split over."""
        return 1 if self.group is None else self.group.size()

    @property
    def begin(self) -> int:
        """Which of the vocabulary is this rank's first column."""
        return 0 if self.group is None else dist.get_rank(self.group) * self.width

    def parts(self) -> Iterator[slice]:
        """The tokens of each chunk."""
        tokens, dim = self.pairs[0][0].shape
        trains_head = any(weight.requires_grad for _, weight in self.pairs)
        size = loss_tokens(tokens, self.width, dim, self.chunks, trains_head)
        return (slice(begin, begin + size) for begin in range(0, tokens, size))


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
    if not isinstance(head := model.output_head, nn.Linear | AdaptedLinear | None):
        raise ConfigError(f"model: no loss knows an output head of kind {type(head).__name__}")
    weight = model.embedding.weight if head is None else head.weight
    own, pairs = own_part(head), [(rows, local(weight))]
    if isinstance(head, AdaptedLinear):
        pairs = head.factors(rows, own)
    if (bias := getattr(head, "bias", None)) is not None:
        pairs.append((rows.new_ones(len(rows), 1), own("bias", bias).unsqueeze(1)))
    group = weight.device_mesh.get_group() if isinstance(weight, DTensor) else None
    return Factors(pairs, group, model.output_softcap, compiled=model.compiles_loss)


def through_head(model: nn.Module, batch: MicroBatch, use: Callable[[Factors], T]) -> T:
    """What `use` makes of the logits of a batch's trained tokens, in a forward pass without logits.

    Args:
        model: a Decoder.
        batch: on the model's device.
    """

    def output(model: nn.Module, hidden: torch.Tensor) -> T:
        return use(factors(model, hidden, batch.trained))

    made: T = model(batch.inputs, output=output)
    return made


# From a chunk's logits, which it may overwrite, the other rows of its tokens, whether a gradient is
# wanted, and the loss's settings, to figures [figures, tokens] in fp32 (fp64 for fp64 logits) and
# the loss's gradient by the logits, in their dtype.
Chunk = Callable[[torch.Tensor, list[Any], bool, Any], tuple[torch.Tensor, Any]]


class Loss(NamedTuple):
    """A sum over tokens of figures of each, by a function of their logits."""

    chunk: Chunk
    # What else the function gets of each token: the rows of a tensor, or a frozen model's logits.
    rows: Sequence[torch.Tensor | Factors | None]
    # What else it gets.
    settings: Any
    # Of each figure in the loss.
    weights: Sequence[float]

    def summed(self, made_of: Factors) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, a scalar, and the sum of each figure, detached; 0 for no token.

        Every token has the same weight in the sum, so each chunk's gradients are made in the
        forward pass, and its logits are computed once. Weight gradients are summed over the chunks
        in fp32. Over a split vocabulary each rank gets all results; the gradient of an input is
        then partial.
        """
        # Of these tensors only there is a buffer for a gradient.
        wanted = [torch.is_grad_enabled() and tensor.requires_grad for tensor in made_of.tensors]
        total, sums = _Summed.apply(self, made_of, wanted, *made_of.tensors)
        return total, sums

    def per_token(self, made_of: Factors) -> torch.Tensor:
        """The first figure of each token, [tokens], with a graph.

        The backward pass computes the logits of each chunk again, because the gradients depend on
        what is made of the results. The function's last row is then the factor of each token.
        """
        return _PerToken.apply(self, made_of, *made_of.tensors)


class _PerToken(torch.autograd.Function):
    """Gradients are made in the backward pass."""

    @staticmethod
    def forward(ctx: Any, loss: Loss, made_of: Factors, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.plan = loss, made_of._replace(pairs=[])
        ctx.save_for_backward(*tensors)
        return _pass(loss, made_of, tensors, [False] * len(tensors))[0][0]

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (loss, made_of), tensors = ctx.plan, ctx.saved_tensors
        made_of = made_of._replace(pairs=list(zip(tensors[::2], tensors[1::2], strict=True)))
        loss = loss._replace(rows=(*loss.rows[:-1], upstream * loss.weights[0]))
        return None, None, *_pass(loss, made_of, tensors, ctx.needs_input_grad[2:])[1]


class _Summed(torch.autograd.Function):
    """Gradients are made in the forward pass; the backward pass scales them once."""

    @staticmethod
    def forward(
        ctx: Any, loss: Loss, made_of: Factors, wanted: Sequence[bool], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        figures, ctx.gradients = _pass(loss, made_of, tensors, wanted)
        sums = torch.stack([row.sum() for row in figures])
        ctx.mark_non_differentiable(sums)
        both = zip(loss.weights, sums.unbind(), strict=True)
        total: Any = sum(weight * value for weight, value in both if weight)
        return total, sums

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the backward pass of a loss without logits runs once only")
        gradients, ctx.gradients = ctx.gradients, None
        return None, None, None, *(None if g is None else g.mul_(upstream) for g in gradients)


def _pass(
    loss: Loss, made_of: Factors, tensors: Sequence[torch.Tensor], wanted: Sequence[bool]
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Figures [figures, tokens], and the loss's gradient for each wanted tensor."""
    exact = torch.promote_types(tensors[0].dtype, torch.float32)
    figures = tensors[0].new_empty(len(loss.weights), len(tensors[0]), dtype=exact)
    # A chunk writes its own rows of the inputs' gradients, and adds to all of the weights'.
    gradients = [
        torch.zeros_like(tensor, dtype=exact if index % 2 else None) if wanted[index] else None
        for index, tensor in enumerate(tensors)
    ]
    chunk = loss.chunk
    if made_of.compiled and made_of.group is None:
        chunk = compiled_chunk(chunk)

    # In a function of its own, so that a chunk's gradient is gone before the next one's is made.
    def one_chunk(part: slice) -> None:
        # No name and no tuple for the logits: once they are made exact nothing must hold them.
        figures[:, part], slope = chunk(
            logits_of(tensors, part),
            [_rows(each, part) for each in loss.rows],
            any(wanted),
            loss.settings,
        )
        for index in range(0, len(tensors), 2):
            inputs, weight = tensors[index : index + 2]
            own, total = gradients[index : index + 2]
            if own is not None:
                torch.mm(slope, weight, out=own[part])
            if total is not None:
                add_product(total, slope.t(), inputs[part])

    for part in made_of.parts():
        one_chunk(part)
    return figures, [
        None if gradient is None else gradient.to(tensor.dtype)
        for gradient, tensor in zip(gradients, tensors, strict=True)
    ]


def _rows(each: torch.Tensor | Factors | None, part: slice) -> torch.Tensor | None:
    if isinstance(each, Factors):
        return logits_of(each.tensors, part)
    return None if each is None else each[part]


def logits_of(tensors: Sequence[torch.Tensor], part: slice) -> torch.Tensor:
    """The logits of some tokens, in memory of their own, from inputs and weights in turn."""
    logits = tensors[0][part] @ tensors[1].t()
    for index in range(2, len(tensors), 2):
        logits.addmm_(tensors[index][part], tensors[index + 1].t())
    return logits


def capped(logits: torch.Tensor, softcap: float | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits in fp32 (fp64) under a model's cap, and their tanh; the given may be overwritten."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is None:
        return logits, None
    tanh = logits.div_(softcap).tanh_()
    return softcap * tanh, tanh


def own_columns(columns: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of columns as this rank's, of which it has `width`, and whether they are its own."""
    held = (columns >= 0) & (columns < width)
    return columns.clamp(0, width - 1), held


def over_ranks(values: torch.Tensor, group: Group, how: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """Values summed in place, or as `how` says, over the ranks of a split vocabulary."""
    if group is not None:
        dist.all_reduce(values, how, group)
    return values


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


@cache
def compiled_chunk(function: Chunk) -> Chunk:
    """A loss's function of a chunk, compiled for any number of tokens."""
    quick = compiled(function)

    def chunk(logits: torch.Tensor, rows: list[Any], slope_wanted: bool, settings: Any) -> Any:
        # How many tokens are trained changes with each batch.
        for tensor in (logits, *rows):
            if tensor is not None:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return quick(logits, rows, slope_wanted, settings)

    return chunk
