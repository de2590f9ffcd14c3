"""How long a training step takes, from what its GPUs compute and what its ranks send.

A message takes what NCCL estimates itself: latency by steps of the ring and bytes over bandwidth,
for the best of its three protocols (NCCL, src/graph/tuning.cc, ncclTopoTuneModel).

What a GPU computes is in `launcher.sizing.compute`. What FSDP gathers for the next layer and
reduces of the last one goes on beside a layer's computation; what does not end with it is waited
for, and so are a step's first gathers and last reductions. Everything that tensor parallelism
sends is waited for. Of a frozen model beside the policy the products count, and not what it sends.
Nothing is measured.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from launcher.errors import UsageFault
from launcher.sizing.communication import Message, messages
from launcher.sizing.compute import Compute, Reached
from launcher.sizing.gpus import Gpu
from launcher.sizing.memory import transfer_bytes
from launcher.sizing.replicas import answers_of_vllm
from launcher.sizing.step_config import GIB, StepConfig
from runspec.flops import utilisation
from runspec.layout import Layout

# Of a link's data sheet, what NCCL reaches with large messages. Its developers name 370 of NVLink's
# 450 GB/s on H100 (NVIDIA/nccl-tests issue 212) and 46 to 48 of the 50 of a 400 Gbit/s port (290);
# 32 nodes of eight such ports gave 340 of 400 (NVIDIA/nccl issue 1218). For others an assumption.
REACHED = 0.8
# Of the multiprocessors, those on which NCCL's kernels run beside computing: about 16 to 24 of 132.
TAKEN = 0.15
# No PCIe link of the known cards is faster; what is, is NVLink.
PCIE_GBS = 64.0


class Protocol(NamedTuple):
    """A protocol of NCCL's over a ring; microseconds, and the share of the bandwidth."""

    base: float
    nvlink: float
    pcie: float
    network: float
    share: float


PROTOCOLS = (
    Protocol(3.6, 0.47, 1.0, 2.7, 0.25),  # LL: a flag beside every four bytes
    Protocol(10.0, 1.9, 2.5, 4.0, 120 / 128),  # LL128: one in sixteen words
    Protocol(8.4, 3.4, 5.7, 9.6, 1.0),  # Simple
)


@dataclass(frozen=True)
class Links:
    """How the GPUs are connected: 10^9 bytes per second of each, in one direction.

    within_gbs: to the others of its node. between_gbs: to other nodes.
    """

    gpus_per_node: int
    within_gbs: float
    between_gbs: float

    @classmethod
    def of(cls, gpu: Gpu, gpus_per_node: int, network_gbits: float | None = None) -> Links:
        """Return the usual links of a kind of GPU, or with the network that is given."""
        between = gpu.network_gbits if network_gbits is None else network_gbits
        return cls(gpus_per_node, gpu.link_gbs, between / 8)

    def ranks_per_node(self, layout: Layout, group: str) -> int:
        """How many ranks of a group share a node.

        Those of a tensor-parallel or an expert-parallel group are neighbours, then those that shard
        a replica, or the same experts.
        """
        split, replica = layout.tensor_parallel, layout.tensor_parallel * layout.shard
        experts = layout.expert_parallel
        stride, reach = {
            "tensor": (1, split),
            "shard": (split, replica),
            "replicate": (replica, layout.ranks),
            "expert": (1, experts),
            "expert shard": (experts, replica),
            "all": (1, layout.ranks),
        }[group]
        return max(1, math.gcd(reach, self.gpus_per_node) // stride)

    def seconds(self, layout: Layout, message: Message) -> float:
        """Time of one such message."""
        local = self.ranks_per_node(layout, message.group)
        nodes, passes = message.ranks // local, 2 if message.kind == "all-reduce" else 1
        if message.kind == "all-to-all":
            return self._all_to_all_seconds(message, local)
        across = passes * (nodes - 1)
        inside = passes * (message.ranks - 1) - across
        # Rings leave a node by every GPU of the group.
        bandwidth = self.between_gbs * local if nodes > 1 else self.within_gbs
        if local > 1:
            bandwidth = min(bandwidth, self.within_gbs)
        one_way = message.sent / message.count / (REACHED * bandwidth * 1e9)
        return self._with_latency(one_way, inside, across)

    def _all_to_all_seconds(self, message: Message, local: int) -> float:
        """What stays in the node and what leaves it go at the same time, over links of their own.

        NCCL makes an all-to-all of sends and receives (its user guide, "Point-to-point
        communication"): each GPU sends its part straight to each other one.
        """
        part = message.size / message.ranks
        within = (local - 1) * part / self.within_gbs if local > 1 else 0.0
        between = (message.ranks - local) * part / self.between_gbs
        one_way = max(within, between) / (REACHED * 1e9)
        return self._with_latency(one_way, int(local > 1), int(message.ranks > local))

    def _with_latency(self, one_way: float, inside: int, across: int) -> float:
        """For the best protocol: steps within the node and across, besides the bytes' time."""
        nvlink = self.within_gbs > PCIE_GBS

        def took(each: Protocol) -> float:
            local_us = each.nvlink if nvlink else each.pcie
            latency_us = each.base + inside * local_us + across * each.network
            return latency_us / 1e6 + one_way / each.share

        return min(map(took, PROTOCOLS))


# A step ------------------------------------------------------------------------------------------

# Bytes per second of shared storage at which weights are written, and read by each node: assumed.
STORAGE_BYTES_PER_S = 1e9
# When messages are sent that no layer hides; see launcher.sizing.communication.Message.
ENDS = ("start", "loss", "turn", "end", "step")


@dataclass
class StepTime:
    """Seconds of one optimizer step, what of them is waiting, and what comes of it."""

    seconds: float
    tensor_parallel_s: float
    sharding_s: float
    tokens_per_second_per_gpu: float
    mfu: float
    hfu: float

    @property
    def computing_share(self) -> float:
        """The share of the time in which a GPU computes."""
        return 1 - (self.tensor_parallel_s + self.sharding_s) / self.seconds


class _Traffic:
    """Seconds of messages: those that a layer waits for, and those beside it by kind of link."""

    def __init__(self, waited: float = 0.0, within: float = 0.0, between: float = 0.0) -> None:
        self.waited, self.within, self.between = waited, within, between

    def __add__(self, other: _Traffic) -> _Traffic:
        both = self.waited + other.waited, self.within + other.within
        return _Traffic(*both, self.between + other.between)

    def __truediv__(self, parts: int) -> _Traffic:
        return _Traffic(self.waited / parts, self.within / parts, self.between / parts)

    @property
    def exposed(self) -> float:
        """All of them, when there is no layer to hide behind."""
        return self.waited + self.within + self.between

    def beside(self, computing: float) -> float:
        """A layer that computes for so long, and sends all of this meanwhile."""
        hidden = min(max(self.within, self.between), computing)
        computing += TAKEN * hidden
        return max(computing + self.waited, self.waited + self.within, self.between)


def _traffic(step: StepConfig, links: Links) -> dict[str, _Traffic]:
    """A step's messages by when they are sent."""
    traffic: dict[str, _Traffic] = defaultdict(_Traffic)
    for message in messages(step):
        # A pass that trains nothing ends with the forward pass.
        if message.on_cpu or (step.top_k and message.when not in ("start", "forward")):
            continue
        took = message.count * links.seconds(step.layout, message)
        local = links.ranks_per_node(step.layout, message.group) == message.ranks
        kind = "waited" if message.waits else "within" if local else "between"
        traffic[message.when] += _Traffic(**{kind: took})
    return traffic


class Parts:
    """Seconds that a rank computes in a step.

    forward, backward: of a layer on average and micro-step, backward with what it computes again.
    once: in a micro-step beside its layers. optimizer: once in a step. host: for the launches of a
    micro-step.
    """

    def __init__(self, *seconds: float) -> None:
        self.forward, self.backward, self.once, self.optimizer, self.host = seconds

    def slower(self, times: float) -> Parts:
        """The same on a GPU that takes so many times as long."""
        return Parts(*(times * seconds for seconds in vars(self).values()))

    def in_all(self, depth: int, micro_steps: int) -> float:
        """Seconds of a step in which no GPU waits for another."""
        working = depth * (self.forward + self.backward) + self.once
        return micro_steps * max(working, self.host) + self.optimizer


def parts_of(step: StepConfig, gpu: Gpu, reached: Reached | None = None) -> Parts:
    """Return what a rank computes; `launcher.sizing.compute` has the terms."""
    compute, depth = Compute(step, gpu, reached), step.shape.layers
    forward = backward = 0.0
    for block, count in step.shape.blocks:
        fore, back = compute.layer(block)
        forward += count * fore / depth
        backward += count * back / depth
    once = compute.ends() + sum(compute.frozen())
    if step.top_k:
        return Parts(forward, 0.0, once, 0.0, compute.host_s())
    return Parts(forward, backward, once, compute.optimizer(), compute.host_s())


def pace_of(step: StepConfig, gpu: Gpu, mfu: float) -> float:
    """Return by how much a GPU is slower than the terms say, if this step has this MFU.

    That is the MFU while it waits for no other GPU. UsageFault if products would run faster than
    the data sheet says.
    """
    depth, micro_steps = step.shape.layers, step.accumulation
    took = parts_of(step, gpu).in_all(depth, micro_steps)
    tokens = micro_steps * step.tokens / step.layout.tensor_parallel
    reached = utilisation(step.flops.model * tokens, took, 1, gpu.bf16_tflops)
    limit = reached / Reached.of(gpu).products
    if mfu > limit:
        raise UsageFault(
            f"--mfu {mfu:g} is more than {gpu.name} can reach with what this recipe computes "
            f"beside its model's FLOPs: give at most {limit:.2f}"
        )
    return reached / mfu


def generation_s(step: StepConfig, gpu: Gpu, links: Links, reached: Reached | None = None) -> float:
    """Seconds per step, on average, in which the policy generates answers that are all as long as
    can be.

    It is gathered once. Each token reads all weights, or waits for the products; the prompts are
    one forward pass, of rows as long as can be. Replicas on rollout nodes share the batches of all
    ranks.
    """
    if not step.on_policy_share:
        return 0.0
    compute, layout = Compute(step, gpu, reached), step.layout
    weights = step.element_bytes * step.shape.parameters
    across = layout.shard * layout.tensor_parallel > step.gpus_per_node
    link = links.between_gbs if across else links.within_gbs
    if step.replicas or step.vllm:
        batches = math.ceil(step.answers_per_step / step.answers_at_once) * layout.data_parallel
        turns = 1 if step.vllm else math.ceil(batches / step.replicas)
        size, length = step.answers_at_once, step.length
        if step.vllm_in_turns:
            turns = math.ceil(size / max(1, answers_of_vllm(step, gpu.memory_gib * GIB)))
            size = math.ceil(size / turns)
        products = 2 * step.shape.active_parameters / compute.flops_per_s / step.rollout_gpus
        token = max(weights / compute.bytes_per_s / step.rollout_gpus, size * products)
        return step.on_policy_share * turns * (size * length * products + step.new_tokens * token)
    gather = weights / (REACHED * link * 1e9) if layout.ranks > layout.replicate else 0.0
    products = 2 * step.shape.parameters / compute.flops_per_s
    token = max(weights / compute.bytes_per_s, step.answers_at_once * products)
    prompts = step.accumulation * step.batch * step.length * products
    answers = step.answers_per_step / step.answers_at_once * step.new_tokens * token
    return step.on_policy_share * (gather + prompts + answers)


def scoring_s(step: StepConfig, gpu: Gpu, reached: Reached | None = None) -> float:
    """Seconds per step, on average, in which reward models score answers that are all as long as
    can be: a forward pass. What functions take is not known.
    """
    if not step.in_reward_models:
        return 0.0
    products = 2 * step.in_reward_models / Compute(step, gpu, reached).flops_per_s
    return step.on_policy_share * step.answers_per_step * step.length * products


def transfer_s(step: StepConfig) -> float:
    """Seconds per step, on average, in which weights are written for the replicas and read."""
    return 2 * transfer_bytes(step) * step.on_policy_share / STORAGE_BYTES_PER_S


def step_time(
    step: StepConfig, gpu: Gpu, links: Links, pace: float = 1.0, reached: Reached | None = None
) -> StepTime:
    """Return the time of a step on GPUs that take `pace` times as long as the terms say."""
    depth, micro_steps, flops = step.shape.layers, step.accumulation, step.flops
    reductions = micro_steps if step.sync_each else 1
    parts = parts_of(step, gpu, reached).slower(pace)
    forward, backward = parts.forward, parts.backward
    computing = parts.in_all(depth, micro_steps)
    generating = pace * (generation_s(step, gpu, links, reached) + scoring_s(step, gpu, reached))
    if not step.max_staleness:
        computing += generating

    sent = _traffic(step, links)
    fore = sent["forward"] / (depth * micro_steps)
    back = (sent["backward"] + sent["recompute"]) / (depth * micro_steps)
    reduced = sent["reduce"] / (depth * reductions)
    # The first layer's weights come before anything is computed, the last one fetches none; so in
    # backward, where the last reduction finds nothing to hide behind either.
    waiting = sum(sent[when].exposed for when in ENDS)
    waiting += micro_steps * (fore.exposed + back.exposed) + reductions * reduced.exposed
    waiting += micro_steps * (depth - 1) * (fore.beside(forward) - forward)
    waiting += (micro_steps - reductions) * (depth - 1) * (back.beside(backward) - backward)
    waiting += reductions * (depth - 1) * ((back + reduced).beside(backward) - backward)
    # Replicas that are ahead generate and score while the ranks update.
    seconds = max(computing + waiting, generating) + transfer_s(step)
    tensor_parallel = sum(traffic.waited for when, traffic in sent.items() if when != "step")
    tokens = step.rows_per_step * step.tokens // step.batch
    ranks, peak = step.gpus, gpu.bf16_tflops
    return StepTime(
        seconds,
        tensor_parallel,
        waiting - tensor_parallel,
        tokens / seconds / ranks,
        mfu=utilisation(flops.model * tokens, seconds, ranks, peak),
        hfu=utilisation(flops.hardware * tokens, seconds, ranks, peak),
    )
