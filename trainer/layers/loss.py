"""The loss as an exact sum over trained tokens, with or without logits of the whole batch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.config import TrainConfig, instantiate
from trainer.errors import ConfigError
from trainer.layers.batch import IGNORE_INDEX, MicroBatch
from trainer.layers.lora import AdaptedLinear
from trainer.parallel.activations import compiled
from trainer.parallel.sharded import full_tensor, local

SUPPORTED = ("CrossEntropyLoss", "CEWithChunkedOutputLoss", "LinearCrossEntropy")
# torchtune's configs name it so after its last release, which has no such class yet.
LATER_NAMES = (
    "torchtune.modules.loss.LinearCrossEntropyLoss",
    "torchtune.modules.loss.cross_entropy_loss.LinearCrossEntropyLoss",
)
# Fewer tokens at a time would leave a GPU idle between its small matrix products.
MIN_CHUNK_TOKENS = 512


class LinearCrossEntropy:
    """Cross-entropy computed together with the output head; the logits never exist as a whole.

    Only trained positions enter the output head. They go through it in chunks, and each chunk's
    gradients are computed at once, so that its logits can be forgotten (as in Liger Kernel,
    arXiv 2410.10989). torch 2.13's own `linear_cross_entropy` does the same; it is not used,
    because it gives the sum in the weights' dtype (4704 for 4740.3 in bf16), and takes neither a
    split vocabulary nor LoRA.

    Args:
        num_output_chunks: how many chunks; None makes a chunk's logits about as large as the
            hidden states, and not smaller than 512 tokens' logits.
        ignore_index: label of the positions that are not trained.
    """

    def __init__(
        self, num_output_chunks: int | None = None, ignore_index: int = IGNORE_INDEX
    ) -> None:
        if num_output_chunks is not None and num_output_chunks < 1:
            raise ValueError("num_output_chunks must be a whole number from 1 on")
        self._chunks = num_output_chunks
        self.ignore_index = ignore_index
        self.compiled = False

    @contextmanager
    def in_place_of_logits(
        self, model: nn.Module, labels: torch.Tensor, trained: torch.Tensor
    ) -> Iterator[None]:
        """Within it `model`, a Decoder, returns the summed loss (a scalar, fp32), not logits.

        Under FSDP the output head's weight is whole only inside the model's forward pass.

        Args:
            labels: int64 [batch, sequence]; labels[b, s] is the target of position s.
            trained: int64 [tokens], the indices of the trained positions in the flattened labels.
        """
        targets = labels.flatten().index_select(0, trained)
        model.unembed = partial(self._summed_loss, model, targets, trained)
        try:
            yield
        finally:
            del model.unembed

    def _summed_loss(
        self, model: nn.Module, targets: torch.Tensor, trained: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        rows = model.final_norm(hidden).flatten(0, 1).index_select(0, trained)
        if model.output_multiplier is not None:
            rows = rows * model.output_multiplier
        pairs, group = _factors(model, rows)
        return linear_cross_entropy(
            pairs,
            targets,
            chunks=self._chunks,
            group=group,
            softcap=model.output_softcap,
            compile_chunks=self.compiled,
        )


Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def _factors(model: nn.Module, rows: torch.Tensor) -> tuple[Pairs, dist.ProcessGroup | None]:
    """Inputs and weights whose products add up to the logits, and who else holds a part of them.

    Args:
        rows: the input of the output head, [tokens, dim].

    Returns:
        [(input [tokens, k], weight [this rank's vocabulary, k]), ...], and the tensor-parallel
        group over which the vocabulary is split, None if it is whole.
    """
    head = model.output_head
    weight = model.embedding.weight if head is None else head.weight
    pairs = [(rows, local(weight))]
    if isinstance(head, AdaptedLinear) and head.magnitude is None:
        # A sees the whole input, but only this rank's rows of B send a gradient back to it.
        a, b = local(head.lora_a.weight, partial_gradient=True), local(head.lora_b.weight)
        pairs.append((head.scaling * F.linear(head.dropout(rows), a), b))
    elif not isinstance(head, nn.Linear | None) or getattr(head, "bias", None) is not None:
        raise ConfigError(
            f"loss: LinearCrossEntropy knows no output head of kind {type(head).__name__}; "
            "set loss._component_=torchtune.modules.loss.CEWithChunkedOutputLoss"
        )
    group = weight.device_mesh.get_group() if isinstance(weight, DTensor) else None
    return pairs, group


def linear_cross_entropy(
    pairs: Pairs,
    targets: torch.Tensor,
    *,
    chunks: int | None = None,
    group: dist.ProcessGroup | None = None,
    softcap: float | None = None,
    compile_chunks: bool = False,
) -> torch.Tensor:
    """Sum over tokens of -log softmax(logits)[target], for logits = sum of input @ weight.T.

    Over a vocabulary split into equal parts in rank order, each rank gives its rows of the
    weights and gets the whole sum; the gradient of an input is then partial.

    Args:
        pairs: (input [tokens, k], weight [vocabulary, k]); only what requires a gradient gets a
            buffer for one. Weight gradients are summed over the chunks in fp32.
        targets: int64 [tokens], numbers of the whole vocabulary.
        chunks: see LinearCrossEntropy.
        group: the ranks that the vocabulary is split over.
        softcap: logits become softcap * tanh(logits / softcap).
        compile_chunks: make few kernels of what is done to the logits, if the vocabulary is whole.

    Returns:
        A scalar, summed in fp32 (fp64 for fp64 inputs); 0 with zero gradients for no token.
    """
    tokens = targets.numel()
    vocabulary, dim = pairs[0][1].shape
    # Of that many chunks, one's logits are about as many numbers as the hidden states.
    least, count = (MIN_CHUNK_TOKENS, -(-vocabulary // dim)) if chunks is None else (1, chunks)
    size = max(least, -(-tokens // count))
    tensors = [tensor for pair in pairs for tensor in pair]
    wanted = [torch.is_grad_enabled() and tensor.requires_grad for tensor in tensors]
    chunk_loss = _compiled_chunk if compile_chunks and group is None else _chunk
    return _LinearCrossEntropy.apply(targets, size, group, softcap, chunk_loss, wanted, *tensors)


class _LinearCrossEntropy(torch.autograd.Function):
    """Gradients are made in the forward pass; the backward pass scales them once."""

    @staticmethod
    def forward(ctx, targets, size, group, softcap, chunk_loss, wanted, *tensors):
        exact = torch.promote_types(tensors[0].dtype, torch.float32)
        total = torch.zeros((), dtype=exact, device=targets.device)
        # A chunk writes its own rows of the inputs' gradients, and adds to all of the weights'.
        gradients = [
            torch.zeros_like(tensor, dtype=exact if index % 2 else None) if wanted[index] else None
            for index, tensor in enumerate(tensors)
        ]
        columns, held = _own_columns(targets, tensors[1].shape[0], group)

        # In a function of its own, so that a chunk's logits are gone before the next one's are
        # made. No name and no tuple for them: once they are made exact nothing must hold them.
        def add_chunk(part: slice) -> torch.Tensor:
            loss, slope = chunk_loss(
                _logits(tensors, part), columns[part], held[part], group, softcap, any(wanted)
            )
            for index in range(0, len(tensors), 2):
                inputs, weight = tensors[index : index + 2]
                if wanted[index]:
                    torch.mm(slope, weight, out=gradients[index][part])
                if wanted[index + 1]:
                    _add_product(gradients[index + 1], slope.t(), inputs[part])
            return loss

        for begin in range(0, targets.numel(), size):
            total += add_chunk(slice(begin, begin + size))
        ctx.gradients = [
            None if gradient is None else gradient.to(tensor.dtype)
            for gradient, tensor in zip(gradients, tensors, strict=True)
        ]
        return total

    @staticmethod
    def backward(ctx, upstream):
        if ctx.gradients is None:
            raise RuntimeError("the backward pass of linear_cross_entropy runs once only")
        gradients, ctx.gradients = ctx.gradients, None
        scaled = (None if g is None else g.mul_(upstream) for g in gradients)
        return None, None, None, None, None, None, *scaled


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
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


def _own_columns(
    targets: torch.Tensor, vocabulary: int, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of this rank's columns each target is, and 1.0 if it is one of them, else 0.0."""
    if group is None:
        return targets, torch.ones_like(targets, dtype=torch.float32)
    own = targets - dist.get_rank(group) * vocabulary
    held = (own >= 0) & (own < vocabulary)
    return own.clamp(0, vocabulary - 1), held.float()


def _logits(tensors: tuple[torch.Tensor, ...], part: slice) -> torch.Tensor:
    logits = tensors[0][part] @ tensors[1].t()
    for index in range(2, len(tensors), 2):
        logits.addmm_(tensors[index][part], tensors[index + 1].t())
    return logits


def _chunk(
    logits: torch.Tensor,
    columns: torch.Tensor,
    held: torch.Tensor,
    group: dist.ProcessGroup | None,
    softcap: float | None,
    slope_wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Summed loss of [tokens, vocabulary] logits, and its gradient, in their dtype.

    The loss is in fp32, or fp64 for fp64 logits, which may be overwritten.
    """
    dtype, tanh = logits.dtype, None
    logits = logits.to(torch.promote_types(dtype, torch.float32))
    if softcap is not None:
        tanh = logits.div_(softcap).tanh_()
        logits = softcap * tanh
    highest = logits.amax(1, keepdim=True)
    if group is not None:
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
    logits -= highest
    columns, held = columns.unsqueeze(1), held.to(logits.dtype).unsqueeze(1)
    chosen = logits.gather(1, columns)
    sums = torch.cat([logits.exp_().sum(1, keepdim=True), chosen * held], 1)
    if group is not None:
        dist.all_reduce(sums, group=group)
    loss = (sums[:, 0].log() - sums[:, 1]).sum()
    if not slope_wanted:
        return loss, None
    slope, own = logits.div_(sums[:, :1]), chosen.exp() / sums[:, :1] - held
    if tanh is not None:
        own = own * (1 - tanh.gather(1, columns).square())
        slope *= tanh.square_().neg_().add_(1)
    # Each number is rounded once; the terms of the target's would cancel out in fewer digits.
    return loss, slope.to(dtype).scatter_(1, columns, own.to(dtype))


def _compiled_chunk(logits: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, Any]:
    # How many tokens are trained changes with each batch.
    for tensor in (logits, *arguments[:2]):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _compiled()(logits, *arguments)


@cache
def _compiled() -> Callable[..., Any]:
    return compiled(_chunk)


class TokenLoss:
    """Cross-entropy summed over the trained tokens of a micro-batch.

    The components return a mean over the micro-batch; the sum lets the caller divide by the
    tokens of all ranks and micro-steps, so that the gradient is the one of a single big batch.

    Raises:
        ConfigError: the component is no cross-entropy, ignores other labels than -100, or does not
            know the model's kind of output head.
    """

    def __init__(self, config: TrainConfig) -> None:
        block = config.loss
        if block["_component_"] in LATER_NAMES:
            block = block | {"_component_": "trainer.layers.loss.LinearCrossEntropy"}
        self._component = instantiate("loss", block)
        name = type(self._component).__name__
        if name not in SUPPORTED:
            raise ConfigError(f"loss: {name} is not supported; known: {', '.join(SUPPORTED)}")
        if getattr(self._component, "reduction", "mean") != "mean":
            raise ConfigError("loss.reduction: must be mean, the trainer divides by all tokens")
        if self._component.ignore_index != IGNORE_INDEX:
            raise ConfigError(f"loss.ignore_index: must be {IGNORE_INDEX}")
        # The model then gives its logits in so many chunks; 0 means whole.
        self.output_chunks = getattr(self._component, "num_output_chunks", 0)
        if isinstance(self._component, LinearCrossEntropy):
            # It reads the output head's weight by itself, so that FSDP must keep it with the root.
            self.output_chunks = 1
            self._component.compiled = config.compile
            if config.model.get("use_dora") and config.model.get("apply_lora_to_output"):
                raise ConfigError(
                    "loss: LinearCrossEntropy knows no DoRA on the output head; set "
                    "model.apply_lora_to_output=False, or "
                    "loss._component_=torchtune.modules.loss.CEWithChunkedOutputLoss"
                )

    def __call__(self, model: nn.Module, batch: MicroBatch, device: torch.device) -> torch.Tensor:
        """Summed loss, a scalar in fp32 with a graph behind it, also if no token is trained.

        Logits that are split over the vocabulary need `vocabulary_split_loss` around this call
        and around the backward pass.
        """
        batch = batch.to(device)
        if isinstance(self._component, LinearCrossEntropy):
            with self._component.in_place_of_logits(model, batch.labels, batch.trained):
                return _forward(model, batch)
        logits = _forward(model, batch)
        chunks = logits if isinstance(logits, list) else [logits]
        if batch.target_count == 0:
            # All ranks must run the same backward pass, and a mean over no token is NaN.
            return full_tensor(sum(chunk.sum() for chunk in chunks)) * 0.0
        if isinstance(logits, list):
            mean = self._component(logits, batch.labels)
        else:
            mean = self._component(logits.flatten(0, 1), batch.labels.flatten())
        return full_tensor(mean) * batch.target_count


def _forward(model: nn.Module, batch: MicroBatch) -> Any:
    return model(batch.tokens, mask=batch.documents, input_pos=batch.positions)
