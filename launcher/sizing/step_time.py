"""How long a training step takes, from what its GPUs compute and what its ranks send.

A message takes what NCCL estimates itself: latency by steps of the ring and bytes over bandwidth,
for the best of its three protocols (NCCL, src/graph/tuning.cc, ncclTopoTuneModel).

Matrix products run at a given share of the GPU's peak. What FSDP gathers for the next layer and
reduces of the last one goes on beside a layer's computation; what does not end with it is waited
for, and so are a step's first gathers and last reductions. Everything that tensor parallelism
sends is waited for. Of a frozen model beside the policy the products count, and not what it sends.
Nothing is measured.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import astuple, dataclass
from operator import add
from typing import NamedTuple

from launcher.errors import UsageFault
from launcher.sizing.activations import recomputed_elements
from launcher.sizing.communication import Message, messages
from launcher.sizing.gpus import Gpu
from launcher.sizing.step_config import StepConfig
from runspec.flops import utilisation
from runspec.layout import Layout

# Of a link's data sheet, what NCCL reaches with large messages. Its developers name 370 of NVLink's
# 450 GB/s on H100 (NVIDIA/nccl-tests issue 212) and 46 to 48 of the 50 of a 400 Gbit/s port (290);
# 32 nodes of eight such ports gave 340 of 400 (NVIDIA/nccl issue 1218). For others an assumption.
REACHED = 0.8
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

# When messages are sent that no layer hides; see launcher.sizing.communication.Message.
ENDS = ("start", "loss", "turn", "end", "step")


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class _Traffic:
    """Seconds of messages: those that a layer waits for, and those beside it by kind of link."""

    waited: float = 0.0
    within: float = 0.0
    between: float = 0.0

    def __add__(self, other: _Traffic) -> _Traffic:
        return _Traffic(*map(add, astuple(self), astuple(other)))

    def __truediv__(self, parts: int) -> _Traffic:
        return _Traffic(*(seconds / parts for seconds in astuple(self)))

    @property
    def exposed(self) -> float:
        """All of them, when there is no layer to hide behind."""
        return self.waited + self.within + self.between

    def beside(self, computing: float) -> float:
        """A layer that computes for so long, and sends all of this meanwhile."""
        return max(computing + self.waited, self.waited + self.within, self.between)


def _traffic(step: StepConfig, links: Links) -> dict[str, _Traffic]:
    """A step's messages by when they are sent."""
    found: dict[str, _Traffic] = defaultdict(_Traffic)
    for message in messages(step):
        if message.on_cpu:
            continue
        took = message.count * links.seconds(step.layout, message)
        local = links.ranks_per_node(step.layout, message.group) == message.ranks
        kind = "waited" if message.waits else "within" if local else "between"
        found[message.when] += _Traffic(**{kind: took})
    return found


def _elements_s(step: StepConfig, gpu: Gpu) -> float:
    """Seconds per layer and micro-step in which "op" computes again what it does not keep.

    Those elements are read once and written once.
    """
    if step.checkpointing != "op":
        return 0.0
    elements = sum(count * recomputed_elements(step, block) for block, count in step.shape.blocks)
    elements /= step.shape.layers
    return 2 * elements / (gpu.memory_bandwidth_gbs * 1e9)


def peak_share(step: StepConfig, gpu: Gpu, mfu: float) -> float:
    """Share of the peak at which products run, if this step has this MFU when it never waits.

    UsageFault if it were more than 1.
    """
    flops, elements_s = step.flops, step.shape.layers * _elements_s(step, gpu) / step.tokens
    # FLOPs per token that the GPUs could do while they compute elements.
    elements = elements_s * step.layout.tensor_parallel * gpu.bf16_tflops * 1e12
    limit = flops.model / (flops.hardware + elements)
    if mfu > limit:
        raise UsageFault(
            f"--mfu {mfu:g} is more than {gpu.name} can reach with what this recipe computes "
            f"again: give at most {limit:.2f}"
        )
    return flops.hardware / (flops.model / mfu - elements)


def step_time(step: StepConfig, gpu: Gpu, links: Links, share: float) -> StepTime:
    """Return the time of a step whose matrix products run at this share of the GPU's peak."""
    depth, micro_steps, flops = step.shape.layers, step.accumulation, step.flops
    reductions = micro_steps if step.sync_each else 1
    per_flop = step.tokens / step.layout.tensor_parallel / (gpu.bf16_tflops * 1e12 * share)
    forward = flops.forward * per_flop
    backward = (flops.backward + flops.recomputed) * per_flop + _elements_s(step, gpu)
    once = flops.output + flops.frozen
    computing = micro_steps * (depth * (forward + backward) + once * per_flop)

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
    seconds = computing + waiting
    tensor_parallel = sum(traffic.waited for when, traffic in sent.items() if when != "step")
    tokens = step.rows_per_step * step.tokens // step.batch
    ranks, peak = step.layout.ranks, gpu.bf16_tflops
    return StepTime(
        seconds,
        tensor_parallel,
        waiting - tensor_parallel,
        tokens / seconds / ranks,
        mfu=utilisation(flops.model * tokens, seconds, ranks, peak),
        hfu=utilisation(flops.hardware * tokens, seconds, ranks, peak),
    )
