"""The output layer and the cross-entropy together, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.parts.measure import Case, Ready, Setting, Tensors, Unavailable, Variant, leaf
from benchmarks.parts.measure import compiled as compile_for
from trainer.loss import LinearCrossEntropy
from trainer.tokenised import IGNORE_INDEX

# Rows of logits that the reference holds at once.
EXACT_ROWS = 1024
# The sum over thousands of tokens averages their errors out.
SUM_TOLERANCE = 1e-3
# Where the sum itself is kept in bf16.
ROUNDED_SUM_TOLERANCE = 1e-2


def cases(setting: Setting) -> Iterator[Case]:
    """Every position trained, with and without a gradient of the weights; and a part of them."""
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
    # The mean over trained positions, as in training.
    upstream = torch.tensor(1 / count, device=setting.device)
    passes = 3 if trained else 2
    return Case(
        name=f"{'full' if trained else 'frozen output layer'}, {share:.0%} of positions trained",
        what=(
            f"{size.tokens} tokens of width {size.dim}, vocabulary {size.vocabulary}, "
            f"{'with' if trained else 'without'} a gradient of the weights"
        ),
        variants=[
            Variant("trainer", lambda: _trainer(labels, *inputs, leaves)),
            Variant(
                "trainer, compiled", lambda: _trainer(labels, *inputs, leaves, setting=setting)
            ),
            Variant("logits and cross_entropy", lambda: _ready(_plain(*inputs, targets), leaves)),
            Variant(
                "logits and cross_entropy, compiled",
                lambda: _ready(compile_for(setting, _plain(*inputs, targets)), leaves),
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
        upstream=upstream,
        rate=("TFLOP/s", 2 * passes * count * weight.numel() / 1e12),
    )


def _ready(run, leaves: Tensors, sum_tolerance: float = SUM_TOLERANCE) -> Ready:
    return Ready(run, leaves, tolerance={"output": sum_tolerance})


def _trainer(
    labels: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    leaves: Tensors,
    setting: Setting | None = None,
) -> Ready:
    """The trainer's loss behind its norm; compiled where a setting is given that allows it."""
    output = nn.Linear(1, 1, bias=False, device="meta")
    # A parameter made of it would be a leaf of its own.
    del output.weight
    output.weight = weight
    model = SimpleNamespace(norm=nn.Identity(), output=output)
    component = LinearCrossEntropy()
    if setting is not None:
        if not setting.compiled:
            raise Unavailable("compiling is switched off")
        component.compiled = True

    trained = (labels.flatten() != IGNORE_INDEX).nonzero().flatten()

    def run() -> torch.Tensor:
        with component.in_place_of_logits(model, labels, trained):
            return model.unembed(hidden)

    return _ready(run, leaves)


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
) -> Ready:
    from torchtune.modules.loss import CEWithChunkedOutputLoss

    loss = CEWithChunkedOutputLoss(ignore_index=IGNORE_INDEX)
    if compiled:
        # As torchtune's recipes compile it.
        loss.compute_cross_entropy = compile_for(setting, loss.compute_cross_entropy)
    count = (targets != IGNORE_INDEX).sum()

    def run() -> torch.Tensor:
        chunks = hidden.chunk(loss.num_output_chunks, dim=1)
        # It gives the mean.
        return loss([F.linear(chunk, weight) for chunk in chunks], targets) * count

    return _ready(run, leaves)


def _torch(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, leaves: Tensors
) -> Ready:
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

    return _ready(run, leaves, ROUNDED_SUM_TOLERANCE)


def _liger(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, leaves: Tensors
) -> Ready:
    from liger_kernel.transformers.fused_linear_cross_entropy import (
        LigerFusedLinearCrossEntropyLoss,
    )

    if not hidden.is_cuda:
        raise Unavailable("needs a GPU")
    loss = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORE_INDEX, reduction="sum")
    return _ready(
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
    """-log softmax(logits)[target], and softmax - one-hot as its slope, in parts of the tokens."""
    rows, weight = hidden.to(setting.exact).flatten(0, 1), weight.to(setting.exact)
    targets = targets.flatten()
    total = rows.new_zeros(())
    by_hidden = torch.zeros_like(rows)
    by_weight = torch.zeros_like(weight) if trained else None
    for part in torch.arange(len(rows), device=rows.device).split(EXACT_ROWS):
        part = part[targets[part] != IGNORE_INDEX]
        shares = F.log_softmax(rows[part] @ weight.t(), dim=1)
        own = torch.arange(len(part), device=rows.device), targets[part]
        total -= shares[own].sum()
        slope = shares.exp_()
        slope[own] -= 1
        by_hidden[part] = slope @ weight * scale
        if by_weight is not None:
            by_weight += slope.t() @ rows[part] * scale
    results = {"output": total, "hidden": by_hidden.view(hidden.shape)}
    return results if by_weight is None else results | {"weight": by_weight}
