"""How long a training step takes, from what its GPUs compute and what its ranks send.

What a GPU computes is in `plugins.estimate.launcher.compute`. What FSDP gathers for the next layer
and reduces of the last one goes on beside a layer's computation; what does not end with it is
waited for, and so are a step's first gather and last reduction. What tensor parallelism
(Korthikanti et al. 2022, arXiv 2205.05198) and expert parallelism send is waited for. Counted are
the large messages. Nothing is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from launcher.gpus import Gpu
from plugins.estimate.launcher.activations import expert_rows
from plugins.estimate.launcher.compute import Compute
from plugins.estimate.launcher.links import Links
from plugins.estimate.launcher.reached import REACHED, Reached
from plugins.estimate.launcher.step_config import StepConfig
from plugins.estimate.launcher.tensors import Unit, units_of
from runspec.flops import tflops_per_gpu

# Of the multiprocessors, those on which NCCL's kernels run beside computing: about 16 to 24 of 132.
TAKEN = 0.15


@dataclass
class StepTime:
    """Seconds of one optimizer step, and what comes of it."""

    seconds: float
    # In which GPUs wait for others.
    waiting_s: float
    # On average, in which the ranks generate answers.
    generating_s: float
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


def computing(step: StepConfig, gpu: Gpu, reached: Reached | None = None) -> Computing:
    """Return what a rank computes."""
    compute, depth = Compute(step, gpu, reached), step.shape.layers
    layers = [(count, compute.layer(block)) for block, count in step.shape.blocks]
    forward, backward = (sum(count * each[way] for count, each in layers) / depth for way in (0, 1))
    once = compute.ends() + sum(compute.frozen())
    return Computing(forward, backward, once, compute.optimizer(), compute.host_s())


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


def step_time(step: StepConfig, gpu: Gpu, links: Links, reached: Reached | None = None) -> StepTime:
    """Return the time of a step."""
    flops, parts, gpus = step.flops, computing(step, gpu, reached), step.layout.ranks
    waiting = _waiting(step, parts, Sending(step, links))
    generating = generation_s(step, gpu, links, reached)
    seconds = parts.in_all(step) + waiting + generating
    tokens = step.rows_per_step * step.tokens // step.batch
    return StepTime(
        seconds,
        waiting,
        generating,
        tokens / seconds / gpus,
        mfu=tflops_per_gpu(flops.model * tokens, seconds, gpus) / gpu.bf16_tflops,
        hfu=tflops_per_gpu(flops.hardware * tokens, seconds, gpus) / gpu.bf16_tflops,
    )


# Answers -----------------------------------------------------------------------------------------


def generation_s(step: StepConfig, gpu: Gpu, links: Links, reached: Reached | None = None) -> float:
    """Seconds per step, on average, in which the policy generates answers that are all as long as
    can be; 0 if rollout nodes do it.

    It is gathered once. Each token reads all weights, or waits for the products; the prompts are
    one forward pass, of rows as long as can be.
    """
    if not step.on_policy_share or step.apart:
        return 0.0
    compute, layout, size = Compute(step, gpu, reached), step.layout, step.answers_at_once
    weights = step.element_bytes * step.shape.parameters
    # transformers' class computes all experts.
    products = 2 * step.shape.parameters / compute.flops_per_s
    across = layout.shard * layout.tensor_parallel > step.gpus_per_node
    link = links.between_gbs if across else links.within_gbs
    gather = weights / (REACHED * link * 1e9) if layout.ranks > layout.replicate else 0.0
    token = max(weights / compute.bytes_per_s, size * products)
    seconds = gather + step.accumulation * step.batch * step.length * products
    seconds += step.answers_per_step / size * step.new_tokens * token
    return step.on_policy_share * seconds
