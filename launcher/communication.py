"""What the ranks send each other in one training step, in closed form.

Each kind of message is listed with its size, its group and how often a step sends it: what FSDP2
gathers and reduces, what tensor parallelism with sequence-parallel norms exchanges (Korthikanti
et al. 2022, arXiv 2205.05198), the loss over a split vocabulary, and the sums that every step
needs. Nothing is fitted; a test compares every message with those of real runs.

A ring sends (n - 1)/n of an all-gather's output or a reduce-scatter's input, and twice that for
an all-reduce, from each of its n ranks (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce
algorithms for clusters of workstations").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.memory import ATTENTION, FP32, NF4_BYTES, ROWWISE, Plan, linear_loss_rows

# Doubles that every step sums over all ranks, and those of a step that is logged: trainer/sft.py.
CONTROL, LOGGED = 7, (1, 4)
# The loss over a split vocabulary sums so many numbers a token: the highest logit, the sum, the
# target's own.
LOSS_SUMS = 3


@dataclass(frozen=True)
class Message:
    """`count` messages of one kind that each rank takes part in, in one step.

    size: bytes of all ranks' parts together: an all-gather's output, a reduce-scatter's or an
    all-reduce's input. when: start, forward, recompute, loss, turn, backward, reduce, end or step,
    as `launcher.scaling` has it. waits: whether the layer that sends it cannot go on meanwhile.
    """

    what: str
    kind: str  # all-gather, reduce-scatter or all-reduce
    group: str  # shard, replicate, tensor or all
    ranks: int
    size: float
    count: int
    when: str
    waits: bool = False

    @property
    def sent(self) -> float:
        """Bytes that each rank sends in a step, over a ring."""
        passes = 2 if self.kind == "all-reduce" else 1
        return self.count * passes * self.size * (self.ranks - 1) / self.ranks


def messages(plan: Plan) -> list[Message]:
    """Every message of a step in which all positions hold a token that is trained."""
    found = [*_weights(plan), *_gradients(plan), *_tensor_parallel(plan), *_loss(plan)]
    found += [*_shares(plan), *_sums(plan)]
    return [message for message in found if message.ranks > 1 and message.count and message.size]


# Parameters ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """One parameter on a rank, as tensor parallelism has left it.

    rows: FSDP cuts these, and fills them up to a multiple of its ranks. width: numbers in a row.
    row_bytes: of a row, as it is gathered. shared: each tensor-parallel rank has a share of its
    gradient.
    """

    rows: int
    width: float
    row_bytes: float
    trained: bool
    shared: bool = False


def _layer(plan: Plan) -> Iterator[Parameter]:
    shape, e, tp, full = plan.shape, plan.element_bytes, plan.tensor_parallel, plan.is_full
    for name, (inside, outside) in shape.matrices.items():
        rowwise = name in ROWWISE
        rows, width = (outside, inside / tp) if rowwise else (outside // tp, inside)
        size = NF4_BYTES if plan.is_quantised else e
        yield Parameter(rows, width, width * size, full)
        if shape.qkv_bias and name in ATTENTION[:3]:
            yield Parameter(rows, 1, e, full)
        if name in plan.lora_targets:
            yield from _adapter(plan, inside, outside, rowwise)
    for _ in range(shape.norms):
        yield Parameter(shape.dim, 1, e, full, shared=True)


def _adapter(plan: Plan, inside: int, outside: int, rowwise: bool = False) -> Iterator[Parameter]:
    """LoRA's A [rank, inside] and B [outside, rank], and DoRA's magnitude [outside]."""
    e, tp, rank = plan.element_bytes, plan.tensor_parallel, plan.lora_rank
    width = inside / tp if rowwise else inside
    rows = outside if rowwise else outside // tp
    yield Parameter(rank, width, width * e, True, shared=not rowwise)
    yield Parameter(rows, rank, rank * e, True, shared=rowwise)
    if plan.is_dora:
        yield Parameter(rows, 1, e, True, shared=rowwise)


def _table(plan: Plan) -> Parameter:
    rows, dim = plan.shape.vocab // plan.tensor_parallel, plan.shape.dim
    return Parameter(rows, dim, dim * plan.element_bytes, plan.is_full)


def _output(plan: Plan) -> list[Parameter]:
    """The output layer; a tied one has no parameters of its own."""
    if plan.shape.tied:
        return []
    adapter = _adapter(plan, plan.shape.dim, plan.shape.vocab) if plan.lora_output else ()
    return [_table(plan), *adapter]


@dataclass(frozen=True)
class Units:
    """The parameters of each FSDP unit: those sharded by themselves, one layer, and the rest."""

    embedding: list[Parameter]
    layer: list[Parameter]
    output: list[Parameter]
    root: list[Parameter]


def _units(plan: Plan) -> Units:
    embedding, output = [_table(plan)], _output(plan)
    norm = Parameter(plan.shape.dim, 1, plan.element_bytes, plan.is_full, shared=True)
    # As trainer/parallel.py decides: a tied table is needed twice, and an output layer that gives
    # its logits in parts, or none, stays with the root.
    apart = set() if plan.shape.tied else set(plan.apart)
    splits = "tok_embeddings" in apart
    ends = "output" in apart and plan.loss == "plain"
    return Units(
        embedding=embedding if splits else [],
        layer=list(_layer(plan)),
        output=output if ends else [],
        root=[*([] if splits else embedding), norm, *([] if ends else output)],
    )


# FSDP ------------------------------------------------------------------------------------------


def _padded(rows: int, shards: int) -> int:
    return -(-rows // shards) * shards


def _gathered(parameters: list[Parameter], shards: int) -> float:
    return sum(_padded(p.rows, shards) * p.row_bytes for p in parameters)


def _reduced(plan: Plan, parameters: list[Parameter]) -> float:
    """Bytes of the gradients as they are reduced."""
    numbers = sum(_padded(p.rows, plan.shard) * p.width for p in parameters if p.trained)
    return plan.reduce_bytes * numbers


def _weights(plan: Plan) -> Iterator[Message]:
    """What is gathered: each unit before its forward and, resharded meanwhile, its backward.

    A recomputed layer is whole already: its recomputation is a part of its backward.
    """
    if not plan.fsdp:
        return
    units, micro_steps, depth = _units(plan), plan.accumulation, plan.shape.layers

    def gather(what: str, unit: list[Parameter], each: int, when: str) -> Message:
        size = _gathered(unit, plan.shard)
        count = each * micro_steps
        return Message(what, "all-gather", "shard", plan.shard, size, count, when)

    yield gather("root's weights", units.root, 1, "start")
    yield gather("embedding", units.embedding, 1, "start")
    yield gather("layers' weights", units.layer, depth, "forward")
    yield gather("output layer", units.output, 1, "forward")
    if plan.reshard:
        yield gather("root's weights", units.root, 1, "turn")
        yield gather("output layer", units.output, 1, "turn")
        yield gather("layers' weights", units.layer, depth, "backward")
        # Also where it is frozen, and nobody needs it: FSDP2 fetches the unit before ahead of time.
        yield gather("embedding", units.embedding, 1, "backward")


def _gradients(plan: Plan) -> Iterator[Message]:
    """What is reduced: within a copy, and then over the copies."""
    if not plan.fsdp:
        return
    units = _units(plan)
    within = plan.accumulation if plan.sync_each else 1
    for what, unit, each, when in (
        ("output layer's gradients", units.output, 1, "reduce"),
        ("layers' gradients", units.layer, plan.shape.layers, "reduce"),
        ("embedding's gradients", units.embedding, 1, "end"),
        ("root's gradients", units.root, 1, "end"),
    ):
        size, shards = _reduced(plan, unit), plan.shard
        yield Message(what, "reduce-scatter", "shard", shards, size, each * within, when)
        over, part = plan.replicate, size / plan.shard
        yield Message(what, "all-reduce", "replicate", over, part, each, when)


# Tensor parallelism ----------------------------------------------------------------------------


def _tensor_parallel(plan: Plan) -> Iterator[Message]:
    """Two gathers and two scatters of the hidden states a layer, forward and backward.

    The embedding scatters and the last norm gathers once more. A layer that is recomputed does
    so again, but for its last scatter, which nothing in its backward needs.
    """
    tp, depth, steps = plan.tensor_parallel, plan.shape.layers, plan.accumulation
    size = plan.element_bytes * plan.tokens * plan.shape.dim

    def exchange(what: str, kind: str, each: int, when: str) -> Message:
        return Message(what, kind, "tensor", tp, size, each * steps, when, waits=True)

    yield exchange("embedding's output", "reduce-scatter", 1, "start")
    yield exchange("norms' outputs", "all-gather", 2 * depth, "forward")
    yield exchange("layers' outputs", "reduce-scatter", 2 * depth, "forward")
    yield exchange("last norm's output", "all-gather", 1, "loss")
    yield exchange("last norm's gradient", "reduce-scatter", 1, "turn")
    # Nothing flows back into what lies before the first adapter: a norm and the embedding.
    full = int(plan.is_full)
    yield exchange("norms' gradients", "reduce-scatter", 2 * depth - 1 + full, "backward")
    yield exchange("layers' gradients", "all-gather", 2 * depth, "backward")
    yield exchange("embedding's gradient", "all-gather", full, "end")
    again = _recomputed(plan)
    # Gemma 2 normalises what is scattered, and so needs it again.
    scatters = 2 if plan.shape.norms == 4 else 1
    yield exchange("norms' outputs", "all-gather", 2 * again, "recompute")
    yield exchange("layers' outputs", "reduce-scatter", scatters * again, "recompute")
    if plan.is_dora:
        for name in (name for name in plan.lora_targets if name in ROWWISE):
            norms_bytes = FP32 * plan.shape.matrices[name][1]
            count = (depth + again) * steps
            what = "DoRA's norms"
            yield Message(what, "all-reduce", "tensor", tp, norms_bytes, count, "forward", True)


def _recomputed(plan: Plan) -> int:
    """How many layers are computed again in backward; by operation none communicates again."""
    if plan.checkpointing in ("none", "op"):
        return 0
    every = 1 if plan.checkpointing == "full" else int(plan.checkpointing)
    return plan.shape.layers // every


def _loss(plan: Plan) -> Iterator[Message]:
    """The loss over a split vocabulary: fp32 sums of each token, for a part of them at a time."""
    tokens, sums = plan.tokens, (1,) * LOSS_SUMS
    size = tokens
    if plan.loss == "linear":
        sums = (1, 2)
        size = linear_loss_rows(plan)
    elif plan.loss == "chunked":
        size = plan.batch * -(-(tokens // plan.batch) // plan.chunks)
    whole, rest = divmod(tokens, size)
    for numbers in sums:
        for part, times in ((size, whole), (rest, 1)):
            count = times * plan.accumulation
            bytes_sent = FP32 * numbers * part
            ranks = plan.tensor_parallel
            yield Message("loss", "all-reduce", "tensor", ranks, bytes_sent, count, "loss", True)


def _shares(plan: Plan) -> Iterator[Message]:
    """Gradients of which each tensor-parallel rank has a share: norms, one half of each adapter.

    FSDP sums them before it reduces them: as they are, or in fp32 where micro-steps added up.
    """
    units, e = _units(plan), plan.element_bytes
    added_up = plan.fsdp and plan.accumulation > 1 and not plan.sync_each
    each = FP32 if added_up else e
    steps = plan.accumulation if plan.fsdp and plan.sync_each else 1
    for unit, times, when in (
        (units.layer, plan.shape.layers, "reduce"),
        ([*units.root, *units.output], 1, "end"),
    ):
        for parameter in unit:
            if parameter.shared and parameter.trained:
                size = each * parameter.rows * parameter.width
                yield Message(
                    "shared gradients",
                    "all-reduce",
                    "tensor",
                    plan.tensor_parallel,
                    size,
                    times * steps,
                    when if plan.fsdp else "step",
                    waits=True,
                )


def _sums(plan: Plan) -> Iterator[Message]:
    """The gradient norm, and what the ranks agree on; the latter goes over the CPU."""
    ranks = plan.ranks
    yield Message("gradient norm", "all-reduce", "all", ranks, FP32, 1, "step", True)
    for numbers in (CONTROL, *LOGGED):
        yield Message("agreement", "all-reduce", "all", ranks, 8 * numbers, 1, "step")
