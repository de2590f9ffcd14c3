"""How long a training step takes, from what its GPUs compute and what its ranks send.

What a GPU computes is in `plugins.estimate.launcher.compute`. What FSDP gathers for the next layer
and reduces of the last one goes on beside a layer's computation; what does not end with it is
waited for, and so are a step's first gather and last reduction. What tensor parallelism
(Korthikanti et al. 2022, arXiv 2205.05198) and expert parallelism send is waited for. Counted are
the large messages. Nothing is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from launcher.errors import UsageFault
from launcher.gpus import REACHED, Gpu, Reached
from plugins.estimate.launcher.activations import expert_rows
from plugins.estimate.launcher.compute import Compute
from plugins.estimate.launcher.links import Links
from plugins.estimate.launcher.memory import transfer_bytes
from plugins.estimate.launcher.samplers import answers_of_vllm
from plugins.estimate.launcher.step_config import GIB, StepConfig
from plugins.estimate.launcher.tensors import Unit, units_of
from runspec.flops import utilisation

# Of the multiprocessors, those on which NCCL's kernels run beside computing: about 16 to 24 of 132.
TAKEN = 0.15
# Bytes per second of shared storage at which weights are written, and read by each node: assumed.
STORAGE_BYTES_PER_S = 1e9


@dataclass
class StepTime:
    """Seconds of one optimizer step, and what comes of it."""

    seconds: float
    # In which GPUs wait for others.
    waiting_s: float
    # Of forward, backward and update alone.
    update_s: float
    # On average, of what comes between steps where answers are sampled.
    generating_s: float
    scoring_s: float
    transfer_s: float
    tokens_per_second_per_gpu: float
    mfu: float
    hfu: float

    @property
    def computing_share(self) -> float:
        """The share of the time in which a GPU computes."""
        return 1 - self.waiting_s / self.seconds


class Computing(NamedTuple):
    """Seconds that a rank computes."""

    # Of a layer on average.
    forward: float
    backward: float
    # In a micro-step, beside its layers.
    once: float
    # In a step's update.
    optimizer: float
    # Of the host, for the launches of a micro-step.
    host: float

    def in_all(self, step: StepConfig) -> float:
        """Seconds of a step in which no GPU waits for another."""
        working = step.shape.layers * (self.forward + self.backward) + self.once
        return step.accumulation * max(working, self.host) + self.optimizer


def computing(
    step: StepConfig, gpu: Gpu, pace: float = 1.0, reached: Reached | None = None
) -> Computing:
    """Return what a rank computes on a GPU that takes `pace` times as long as the terms say."""
    compute, depth = Compute(step, gpu, reached), step.shape.layers
    layers = [(count, compute.layer(block)) for block, count in step.shape.blocks]
    forward, backward = (sum(count * each[way] for count, each in layers) / depth for way in (0, 1))
    once = compute.ends() + sum(compute.frozen())
    parts = (forward, backward, once, compute.optimizer(), compute.host_s())
    return Computing(*(pace * seconds for seconds in parts))


def mfu_of(step: StepConfig, gpu: Gpu) -> float:
    """Return the model FLOPs utilisation of a GPU while it waits for no other."""
    tokens = step.accumulation * step.tokens / step.layout.tensor_parallel
    took = computing(step, gpu).in_all(step)
    return utilisation(step.flops.model * tokens, took, 1, gpu.bf16_tflops)


def pace_of(step: StepConfig, gpu: Gpu, mfu: float) -> float:
    """Return by how much a GPU is slower than the terms say, if this step has this MFU.

    That is the MFU while it waits for no other GPU. UsageFault if products would run faster than
    the data sheet says.
    """
    reached = mfu_of(step, gpu)
    limit = reached / Reached.of(gpu).products
    if mfu > limit:
        raise UsageFault(
            f"--mfu {mfu:g} is more than {gpu.name} can reach with what this recipe computes "
            f"beside its model's FLOPs: give at most {limit:.2f}"
        )
    return reached / mfu


class Sending:
    """Seconds of what a rank sends: gather and reduce of a layer on average, and its sum over the
    replicas (across); the same of the ends, which nothing hides; exchanges: by tensor and expert
    parallelism in a micro-step.
    """

    def __init__(self, step: StepConfig, links: Links) -> None:
        self.step, self.links = step, links
        units, depth = units_of(step), step.shape.layers
        kinds = [units.kinds[kind] for kind in step.shape.order]
        self.gather = sum(map(self._gather_s, kinds)) / depth
        self.reduce = sum(map(self._reduce_s, kinds)) / depth
        self.across = sum(self._across_s(unit.here) for unit in kinds) / depth * step.fsdp
        ends = units.ends.plus(units.embedding)
        self.gather_ends, self.reduce_ends = self._gather_s(ends), self._reduce_s(ends)
        # A model that each rank has whole: all gradients in one message.
        self.across_ends = self._across_s(ends.here if step.fsdp else units.whole.trained)
        self.exchanges = self._exchanges_s()

    def _gather_s(self, unit: Unit) -> float:
        """The shards of other ranks, in the dtype of the computation."""
        step, layout = self.step, self.step.layout
        here = unit.stored + (step.element_bytes - step.weight_bytes) * unit.here
        return self.links.ring_s(unit.gathered - here, layout.shard, layout.tensor_parallel)

    def _reduce_s(self, unit: Unit) -> float:
        sent, layout = self.step.reduce_bytes * (unit.trained - unit.here), self.step.layout
        return self.links.ring_s(sent, layout.shard, layout.tensor_parallel)

    def _across_s(self, numbers: float) -> float:
        layout = self.step.layout
        ranks, stride = layout.replicate, layout.tensor_parallel * layout.shard
        sent = 2 * self.step.reduce_bytes * numbers * (ranks - 1) / ranks
        return self.links.ring_s(sent, ranks, stride, passes=2)

    def _exchanges_s(self) -> float:
        """Tensor parallelism gathers and scatters the hidden states around attention and MLP, or
        once in a layer with experts, and at both ends; expert parallelism sends the rows there and
        back. All of it forward and backward; the exchanges again if they are recomputed.
        """
        step, tp, ep = self.step, self.step.layout.tensor_parallel, self.step.layout.expert_parallel
        hidden, took = step.element_bytes * step.shape.dim, 0.0
        each = self.links.ring_s(hidden * step.tokens * (tp - 1) / tp, tp)
        again = step.recomputed_share
        for block, count in step.shape.blocks:
            took += count * (2 + again) * (2 if block.experts else 4) * each
            if block.experts and ep > 1:
                rows = self.links.all_to_all_s(hidden * expert_rows(step, block), ep)
                took += count * (2 + (again or step.checkpointing == "op")) * 2 * rows
        return took + 4 * each


def _waiting(step: StepConfig, parts: Computing, sent: Sending) -> float:
    """Seconds that a rank waits for others. The first layer's weights come before anything is
    computed, the last reduction after it; replicas are summed up once.
    """
    depth, micro_steps = step.shape.layers, step.accumulation
    # In a layer's forward pass, and as much in its backward pass.
    exchanging = sent.exchanges / depth / 2

    def beside(computing: float, sending: float) -> float:
        """How much longer all layers take that send meanwhile."""
        more = max(TAKEN * min(sending, computing), sending - computing - exchanging)
        return (depth - 1) * more

    forward = sent.gather_ends + sent.gather + beside(parts.forward, sent.gather) + sent.exchanges
    again = sent.gather * step.reshard
    each = sent.reduce * step.sync_each
    last = sent.reduce + sent.across
    waiting = micro_steps * forward + (micro_steps - 1) * (beside(parts.backward, again + each))
    waiting += beside(parts.backward, again + last) + last + sent.across_ends
    reductions = micro_steps if step.sync_each else 1
    return waiting + (reductions - 1) * each + reductions * sent.reduce_ends


def step_time(
    step: StepConfig, gpu: Gpu, links: Links, pace: float = 1.0, reached: Reached | None = None
) -> StepTime:
    """Return the time of a step on GPUs that take `pace` times as long as the terms say."""
    flops, parts = step.flops, computing(step, gpu, pace, reached)
    waiting = _waiting(step, parts, Sending(step, links))
    generating = pace * generation_s(step, gpu, links, reached)
    scoring, transfer = pace * scoring_s(step, gpu, reached), transfer_s(step)
    update = parts.in_all(step) + waiting
    # Samplers that are ahead generate and score while the ranks update.
    phases = (update, generating + scoring)
    seconds = (max(phases) if step.max_staleness else sum(phases)) + transfer
    tokens = step.rows_per_step * step.tokens // step.batch
    return StepTime(
        *(seconds, waiting, update, generating, scoring, transfer),
        tokens / seconds / step.gpus,
        mfu=utilisation(flops.model * tokens, seconds, step.gpus, gpu.bf16_tflops),
        hfu=utilisation(flops.hardware * tokens, seconds, step.gpus, gpu.bf16_tflops),
    )


# Answers -----------------------------------------------------------------------------------------


def generation_s(step: StepConfig, gpu: Gpu, links: Links, reached: Reached | None = None) -> float:
    """Seconds per step, on average, in which the policy generates answers that are all as long as
    can be.

    It is gathered once. Each token reads all weights, or waits for the products; the prompts are
    one forward pass, of rows as long as can be. Samplers on rollout nodes share the batches of all
    ranks.
    """
    if not step.on_policy_share:
        return 0.0
    compute, layout, size = Compute(step, gpu, reached), step.layout, step.answers_at_once
    weights, gather, apart = step.element_bytes * step.shape.parameters, 0.0, 1
    products = 2 * step.shape.active_parameters / compute.flops_per_s
    prompts: float = step.accumulation * step.batch
    turns: float = step.answers_per_step / size
    if step.sampling_gpus or step.vllm:
        apart = step.rollout_gpus
        turns = ceil(turns) * layout.data_parallel
        turns = 1 if step.vllm else ceil(turns / step.sampling_gpus)
        if step.vllm_in_turns:
            turns = ceil(size / max(1, answers_of_vllm(step, gpu.memory_gib * GIB)))
            size = ceil(size / turns)
        prompts = turns * size / apart
    else:
        # transformers' class computes all experts.
        products = 2 * step.shape.parameters / compute.flops_per_s
        across = layout.shard * layout.tensor_parallel > step.gpus_per_node
        link = links.between_gbs if across else links.within_gbs
        gather = weights / (REACHED * link * 1e9) if layout.ranks > layout.replicate else 0.0
    token = max(weights / compute.bytes_per_s, size * products) / apart
    seconds = gather + prompts * step.length * products + turns * step.new_tokens * token
    return step.on_policy_share * seconds


def scoring_s(step: StepConfig, gpu: Gpu, reached: Reached | None = None) -> float:
    """Seconds per step, on average, in which reward models score answers that are all as long as
    can be: a forward pass. What functions take is not known.
    """
    if not step.in_reward_models:
        return 0.0
    products = 2 * step.in_reward_models / Compute(step, gpu, reached).flops_per_s
    return step.on_policy_share * step.answers_per_step * step.length * products


def transfer_s(step: StepConfig) -> float:
    """Seconds per step, on average, in which weights are written for the samplers and read."""
    return 2 * transfer_bytes(step) * step.on_policy_share / STORAGE_BYTES_PER_S
