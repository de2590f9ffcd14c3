"""What the ranks send each other in one training step, in closed form.

Each kind of message is listed with its size, its group and how often a step sends it: what FSDP2
gathers and reduces, what tensor parallelism with sequence-parallel norms exchanges (Korthikanti
et al. 2022, arXiv 2205.05198), the loss over a split vocabulary, and the sums that every step
needs. Nothing is fitted; a test compares every message with those of real runs.

A ring sends (n - 1)/n of an all-gather's output or a reduce-scatter's input, and twice that for
an all-reduce, from each of its n ranks (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce
algorithms for clusters of workstations").
"""

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.sizing.activations import expert_rows
from launcher.sizing.step_config import FP32, StepConfig
from launcher.sizing.tensors import Unit, Units, linear_loss_rows, units_of
from runspec.step import StepSums

# Doubles that the ranks sum in a step that is logged: trainer/loop.py.
LOGGED = (2, 4)
# What the objective logs beside the loss if its routers are watched: trainer/layers/balance.py.
BALANCE = 3
# The loss over a split vocabulary sums so many numbers per token: the highest logit, the sum, the
# target's own.
LOSS_SUMS = 3


@dataclass
class Message:
    """`count` messages of one kind that each rank takes part in, in one step.

    size: bytes of all ranks' parts together: an all-gather's output, a reduce-scatter's or an
    all-reduce's input; of an all-to-all what one rank has for all. when: start, forward, recompute,
    loss, turn, backward, reduce, end or step, as `launcher.sizing.step_time` has it. on_cpu: it
    goes over the CPU, while the GPU works.
    """

    what: str
    kind: str  # all-gather, reduce-scatter, all-reduce or all-to-all
    group: str  # shard, replicate, tensor, expert, expert shard or all
    ranks: int
    size: float
    count: int
    when: str
    on_cpu: bool = False

    @property
    def waits(self) -> bool:
        """Whether what sends it must wait for it, with no other work to do."""
        return self.group in ("tensor", "expert", "all") and not self.on_cpu

    @property
    def sent(self) -> float:
        """Bytes that each rank sends in a step, over a ring."""
        passes = 2 if self.kind == "all-reduce" else 1
        return self.count * passes * self.size * (self.ranks - 1) / self.ranks


def messages(step: StepConfig) -> list[Message]:
    """Every message of a step in which all positions hold a token that is trained."""
    units = units_of(step)
    all_messages = [*_weights(step, units), *_gradients(step, units)] if step.fsdp else []
    all_messages += [*_tensor_parallel(step), *_experts(step), *_loss(step)]
    all_messages += [*_shared_gradients(step, units), *_replicas(step, units), *_sums(step)]
    return [
        message for message in all_messages if message.ranks > 1 and message.count and message.size
    ]


# FSDP ------------------------------------------------------------------------------------------


def _weights(step: StepConfig, units: Units) -> Iterator[Message]:
    """What is gathered: each unit before its forward and, resharded meanwhile, its backward.

    Root and output layer stay gathered, and a plain embedding's backward needs no weights. A
    recomputed layer is whole already: its recomputation is a part of its backward.
    """

    def gather(what: str, unit: Unit, each: int, when: str, group: str = "shard") -> Message:
        size, count = unit.gathered, each * step.accumulation
        return Message(what, "all-gather", group, unit.shards, size, count, when)

    def gather_blocks(when: str) -> Iterator[Message]:
        for block in units.blocks:
            yield gather("layers' weights", block.own, block.number, when)
            yield gather("experts' weights", block.experts, block.number, when, "expert shard")

    yield gather("root's weights", units.root, 1, "start")
    yield gather("embedding", units.embedding, 1, "start")
    yield from gather_blocks("forward")
    yield gather("output layer", units.output, 1, "forward")
    if step.reshard:
        yield from gather_blocks("backward")


def _gradients(step: StepConfig, units: Units) -> Iterator[Message]:
    """What is reduced: within a replica, and then over the replicas."""
    replicas, within = step.layout.replicate, step.accumulation if step.sync_each else 1
    # A loss that reads the output layer's weight by itself leaves its gradient to the end.
    when = "reduce" if step.loss == "plain" else "end"
    reduced = [("output layer's gradients", units.output, 1, when, "shard")]
    for block in units.blocks:
        reduced += [
            ("layers' gradients", block.own, block.number, "reduce", "shard"),
            ("experts' gradients", block.experts, block.number, "reduce", "expert shard"),
        ]
    reduced += [
        ("embedding's gradients", units.embedding, 1, "end", "shard"),
        ("root's gradients", units.root, 1, "end", "shard"),
    ]
    for what, unit, each, when, group in reduced:
        size = step.reduce_bytes * unit.reduced
        yield Message(what, "reduce-scatter", group, unit.shards, size, each * within, when)
        yield Message(what, "all-reduce", "replicate", replicas, size / unit.shards, each, when)


# Tensor parallelism ----------------------------------------------------------------------------


def _tensor_parallel(step: StepConfig) -> Iterator[Message]:
    """Two gathers and two scatters of the hidden states per layer, forward and backward.

    Experts take each rank's own tokens: a layer that has them gathers and scatters once. The
    embedding scatters and the last norm gathers once more. A layer that is recomputed does so
    again, but for its last scatter, which nothing in its backward needs. Fused layers exchange
    their outputs, and norms over all heads sum each token's squares.
    """
    tp = step.layout.tensor_parallel
    both = sum(count * (1 if block.experts else 2) for block, count in step.shape.blocks)
    hidden = step.element_bytes * step.tokens * step.shape.dim

    def exchange(what: str, kind: str, each: int, when: str, size: float = hidden) -> Message:
        count = each * step.accumulation
        return Message(what, kind, "tensor", tp, size, count, when)

    yield exchange("embedding's output", "reduce-scatter", 1, "start")
    yield exchange("norms' outputs", "all-gather", both, "forward")
    yield exchange("layers' outputs", "reduce-scatter", both, "forward")
    yield exchange("last norm's output", "all-gather", 1, "loss")
    yield exchange("last norm's gradient", "reduce-scatter", 1, "turn")
    # Nothing flows back into what lies before the first adapter: a norm and the embedding.
    full = int(step.is_full)
    yield exchange("norms' gradients", "reduce-scatter", both - 1 + full, "backward")
    yield exchange("layers' gradients", "all-gather", both, "backward")
    yield exchange("embedding's gradient", "all-gather", full, "end")
    for block, count in step.shape.blocks:
        # Recomputed by operation, no layer communicates again.
        again = count // round(1 / step.recomputed_share) if step.recomputed_share else 0
        parts = 1 if block.experts else 2
        # What is normalised behind the scatter is needed again.
        behind = block.norms_behind or parts == 1
        yield exchange("norms' outputs", "all-gather", parts * again, "recompute")
        scatters = parts if behind else parts - 1
        yield exchange("layers' outputs", "reduce-scatter", scatters * again, "recompute")
        passes = (("forward", count), ("recompute", again), ("backward", count))
        for when, layers in passes:
            for width in block.fused_widths:
                size = step.element_bytes * step.tokens * width / tp
                yield exchange("fused layers' outputs", "all-to-all", layers, when, size)
            squares, norms = FP32 * step.tokens, block.split_norms
            yield exchange("norms' squares", "all-reduce", norms * layers, when, squares)
        for _, matrix in step.adapted(block) if step.is_dora else ():
            if matrix.role == "row" and step.split_of(matrix) > 1:
                squares = FP32 * matrix.outputs
                yield exchange("DoRA's norms", "all-reduce", count + again, "forward", squares)


def _experts(step: StepConfig) -> Iterator[Message]:
    """Expert parallelism: each token's hidden state to the ranks of its experts and back, forward
    and backward, and once before it how many there are for each expert.

    A rank has as many rows for the others whatever the router chooses; that it gets as many is the
    even spread which routers are trained for. A layer that is recomputed sends the rows again.
    """
    ranks = step.layout.expert_parallel
    for block, count in step.shape.blocks:
        if not block.experts or ranks == 1:
            continue
        rows = step.element_bytes * expert_rows(step, block) * step.shape.dim
        share = 1.0 if step.checkpointing == "op" else step.recomputed_share
        again = count // round(1 / share) if share else 0
        for when, layers, counts in (
            ("forward", count, 1),
            ("recompute", again, 0),
            ("backward", count, 0),
        ):
            times, numbers = layers * step.accumulation, 8 * block.experts[0].count
            sizes = (("rows per expert", numbers, counts), ("experts' rows", rows, 2))
            for what, size, each in sizes:
                yield Message(what, "all-to-all", "expert", ranks, size, each * times, when)


def _loss(step: StepConfig) -> Iterator[Message]:
    """The loss over a split vocabulary: fp32 sums of each token, for a part of them at a time."""
    if step.loss == "score":
        return  # a few bytes for each document
    tokens, tp, sums = step.tokens, step.layout.tensor_parallel, (1,) * LOSS_SUMS
    size = tokens
    if step.loss == "linear":
        sums = (1, 2)
        size = linear_loss_rows(step)
    elif step.loss == "chunked":
        size = step.batch * -(-(tokens // step.batch) // step.chunks)
    whole, rest = divmod(tokens, size)
    for numbers in sums:
        for part, times in ((size, whole), (rest, 1)):
            sent, count = FP32 * numbers * part, times * step.accumulation
            yield Message("loss", "all-reduce", "tensor", tp, sent, count, "loss")


def _shared_gradients(step: StepConfig, units: Units) -> Iterator[Message]:
    """Gradients of which each tensor-parallel rank has a share: norms, one half of each adapter.

    FSDP sums them before it reduces them: as they are, or in fp32 if micro-steps added up.
    """
    tp = step.layout.tensor_parallel
    added_up = step.fsdp and step.accumulation > 1 and not step.sync_each
    number_bytes = FP32 if added_up else step.element_bytes
    times = step.accumulation if step.fsdp and step.sync_each else 1
    blocks = [(block.own, block.number, "reduce") for block in units.blocks]
    for unit, each, when in (*blocks, (units.root + units.output, 1, "end")):
        when = when if step.fsdp else "step"
        for p in unit.parameters:
            if p.shared and p.trained:
                size, count = number_bytes * p.rows * p.width, each * times
                yield Message("shared gradients", "all-reduce", "tensor", tp, size, count, when)


def _replicas(step: StepConfig, units: Units) -> Iterator[Message]:
    """The gradients of a model that every rank has whole, in one message after the micro-steps."""
    if not step.fsdp:
        size = step.reduce_bytes * units.sum(lambda unit: unit.trained)
        ranks = step.layout.replicate
        yield Message("replicas' gradients", "all-reduce", "replicate", ranks, size, 1, "step")


def _sums(step: StepConfig) -> Iterator[Message]:
    """The gradient norm, and what the ranks agree on."""
    ranks = step.layout.ranks
    yield Message("gradient norm", "all-reduce", "all", ranks, FP32, 1, "step")
    logged, blocks = LOGGED, step.shape.blocks
    if watched := sum(count * b.experts[0].count for b, count in blocks if b.watched):
        size, times = FP32 * watched, step.accumulation
        yield Message("experts' load", "all-reduce", "all", ranks, size, times, "step")
        logged = (LOGGED[0] + BALANCE, *LOGGED[1:])
    for numbers in (len(StepSums._fields), *logged):
        yield Message("agreement", "all-reduce", "all", ranks, 8 * numbers, 1, "step", on_cpu=True)
