"""Output layer and cross-entropy loss together, forward and backward."""

from collections.abc import Iterator
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.parts.measure import Case, Runnable, Setting, Tensors, Unavailable, Variant, leaf
from benchmarks.parts.measure import compiled as compile_for
from trainer.layers.batch import IGNORE_INDEX, MicroBatch
from trainer.layers.loss import LinearCrossEntropy

# Tokens whose logits the reference computes at once.
EXACT_ROWS = 1024
# The summed loss: errors of thousands of tokens partly cancel.
SUM_TOLERANCE = 1e-3
# For losses that return the sum in bf16.
ROUNDED_SUM_TOLERANCE = 1e-2


def cases(setting: Setting) -> Iterator[Case]:
    """All tokens trained, with and without a weight gradient; and 40 % of the tokens trained."""
    for trained, share in ((True, 1.0), (False, 1.0), (False, 0.4)):
        yield _case(setting, trained, share)


def _case(setting: Setting, trained: bool, share: float) -> Case:
    size = setting.size
    hidden = setting.random(size.batch, size.sequence, size.dim, seed=0)
    weight = setting.random(size.vocabulary, size.dim, scale=size.dim**-0.5, seed=1)
    random = torch.Generator().manual_seed(2)
    shape = size.batch, size.sequence
    labels = torch.randint(size.vocabulary, shape, generator=random)
    labels[torch.rand(shape, generator=random) >= share] = IGNORE_INDEX
    leaves = {"hidden": leaf(hidden)} | ({"weight": leaf(weight)} if trained else {})
    inputs = leaves["hidden"], leaves.get("weight", weight)
    targets = labels.to(setting.device)
    count = int((labels != IGNORE_INDEX).sum())
    # The mean over trained tokens, as in training.
    grad_output = torch.tensor(1 / count, device=setting.device)
    passes = 3 if trained else 2
    return Case(
        name=f"{'full' if trained else 'frozen output layer'}, {share:.0%} of tokens trained",
        what=(
            f"{size.tokens} tokens of width {size.dim}, vocabulary {size.vocabulary}, "
            f"{'with' if trained else 'without'} a weight gradient"
        ),
        variants=[
            Variant("trainer", lambda: _trainer(labels, *inputs, leaves)),
            Variant(
                "trainer, compiled", lambda: _trainer(labels, *inputs, leaves, setting=setting)
            ),
            Variant(
                "logits and cross_entropy", lambda: _runnable(_plain(*inputs, targets), leaves)
            ),
            Variant(
                "logits and cross_entropy, compiled",
                lambda: _runnable(compile_for(setting, _plain(*inputs, targets)), leaves),
            ),
            Variant("torchtune, 8 chunks", lambda: _torchtune(setting, *inputs, targets, leaves)),
            Variant(
                "torchtune, 8 chunks, compiled",
                lambda: _torchtune(setting, *inputs, targets, leaves, compiled=True),
            ),
            Variant("torch linear_cross_entropy", lambda: _torch(*inputs, targets, leaves)),
            Variant("Liger", lambda: _liger(*inputs, targets, leaves)),
        ],
        reference=lambda: _reference(setting, hidden, weight, targets, trained, 1 / count),
        tolerance=setting.tolerance,
        grad_output=grad_output,
        rate=("TFLOP/s", 2 * passes * count * weight.numel() / 1e12),
    )


def _runnable(run, leaves: Tensors, sum_tolerance: float = SUM_TOLERANCE) -> Runnable:
    return Runnable(run, leaves, tolerance={"output": sum_tolerance})


def _trainer(
    labels: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    leaves: Tensors,
    setting: Setting | None = None,
) -> Runnable:
    """The trainer's LinearCrossEntropy; compiled if a setting is given."""
    output = nn.Linear(1, 1, bias=False, device="meta")
    # Set as a plain attribute: nn.Parameter would make a new leaf tensor.
    del output.weight
    output.weight = weight
    model = SimpleNamespace(
        final_norm=nn.Identity(), output_head=output, output_softcap=None, output_multiplier=None
    )
    component = LinearCrossEntropy()
    if setting is not None:
        if not setting.compiled:
            raise Unavailable("torch.compile is switched off")
        component.compiled = True

    trained = (labels.flatten() != IGNORE_INDEX).nonzero().flatten()
    lengths, owners = (labels.numel(),), torch.zeros_like(trained)
    counts = (labels.numel(), len(trained))
    samples = torch.arange(1), torch.zeros(1)
    batch = MicroBatch(labels, labels, trained, *counts, lengths, owners, *samples)
    return _runnable(lambda: component(model, hidden, batch), leaves)


def _plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor):
    def run() -> torch.Tensor:
        logits = F.linear(hidden, weight).flatten(0, 1).float()
        return F.cross_entropy(
            logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )

    return run


def _torchtune(
    setting: Setting,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    leaves: Tensors,
    compiled: bool = False,
) -> Runnable:
    from torchtune.modules.loss import CEWithChunkedOutputLoss

    loss = CEWithChunkedOutputLoss(ignore_index=IGNORE_INDEX)
    if compiled:
        # torchtune's recipes compile this method.
        loss.compute_cross_entropy = compile_for(setting, loss.compute_cross_entropy)
    count = (targets != IGNORE_INDEX).sum()

    def run() -> torch.Tensor:
        chunks = hidden.chunk(loss.num_output_chunks, dim=1)
        # torchtune returns the mean.
        return loss([F.linear(chunk, weight) for chunk in chunks], targets) * count

    return _runnable(run, leaves)


def _torch(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, leaves: Tensors
) -> Runnable:
    if not hasattr(F, "linear_cross_entropy"):
        raise Unavailable("this torch has no linear_cross_entropy")
    options = nn.LinearCrossEntropyOptions()

    def run() -> torch.Tensor:
        return F.linear_cross_entropy(
            hidden.flatten(0, 1),
            weight,
            targets.flatten(),
            reduction="sum",
            ignore_index=IGNORE_INDEX,
            options=options,
        )

    return _runnable(run, leaves, ROUNDED_SUM_TOLERANCE)


def _liger(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, leaves: Tensors
) -> Runnable:
    from liger_kernel.transformers.fused_linear_cross_entropy import (
        LigerFusedLinearCrossEntropyLoss,
    )

    if not hidden.is_cuda:
        raise Unavailable("needs a GPU")
    loss = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORE_INDEX, reduction="sum")
    return _runnable(
        lambda: loss(weight, hidden.flatten(0, 1), targets.flatten()),
        leaves,
        ROUNDED_SUM_TOLERANCE,
    )


@torch.no_grad()
def _reference(
    setting: Setting,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    trained: bool,
    scale: float,
) -> Tensors:
    """-log softmax(logits)[target] and its gradient softmax - one_hot, in chunks of tokens."""
    rows, weight = (
        hidden.to(setting.reference_dtype).flatten(0, 1),
        weight.to(setting.reference_dtype),
    )
    targets = targets.flatten()
    total = rows.new_zeros(())
    grad_hidden = torch.zeros_like(rows)
    grad_weight = torch.zeros_like(weight) if trained else None
    for part in torch.arange(len(rows), device=rows.device).split(EXACT_ROWS):
        part = part[targets[part] != IGNORE_INDEX]
        log_probabilities = F.log_softmax(rows[part] @ weight.t(), dim=1)
        target = torch.arange(len(part), device=rows.device), targets[part]
        total -= log_probabilities[target].sum()
        grad_logits = log_probabilities.exp_()
        grad_logits[target] -= 1
        grad_hidden[part] = grad_logits @ weight * scale
        if grad_weight is not None:
            grad_weight += grad_logits.t() @ rows[part] * scale
    results = {"output": total, "hidden": grad_hidden.view(hidden.shape)}
    return results if grad_weight is None else results | {"weight": grad_weight}
