"""How fast a recipe would be on more nodes and in other layouts, from what its ranks send.

A GPU computes at a stated share of its peak while it waits for nobody. What FSDP gathers for the
next layer and reduces of the last one goes on beside a layer's computation; what does not end with
it is waited for, and so are a step's first gathers and last reductions. What tensor parallelism
sends is waited for whole. Nothing is measured.

A message takes NCCL's own estimate of it: latency by steps of the ring and bytes over bandwidth,
for the best of its three protocols (NCCL, src/graph/tuning.cc, ncclTopoTuneModel).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from launcher.communication import Message, messages
from launcher.estimate import Gpu, Report, layout_faults
from launcher.memory import GIB, Estimate, Plan, recomputed_elements

# When messages are sent that no layer hides; see launcher.communication.Message.
ENDS = ("start", "loss", "turn", "end", "step")
NODES = (2, 4, 8, 16, 32, 64)
SPLITS = (1, 2, 4, 8)
# Of a link's data sheet, what NCCL reaches with large messages. Its developers name 370 of NVLink's
# 450 GB/s on H100 (NVIDIA/nccl-tests issue 212) and 46 to 48 of the 50 of a 400 Gbit/s port (290);
# 32 nodes of eight such ports gave 340 of 400 (NVIDIA/nccl issue 1218). For others an assumption.
REACHED = 0.8
# No PCIe link of the known cards is faster; what is, is NVLink.
PCIE_GBS = 64.0


@dataclass(frozen=True)
class Protocol:
    """One way of NCCL's to send over a ring; microseconds, and shares of the bandwidth."""

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
    """How the GPUs are joined: 10^9 bytes a second of each, in one direction.

    within: to the others of its node. between: to other nodes.
    """

    gpus_per_node: int
    within_gbs: float
    between_gbs: float

    @classmethod
    def of(cls, device: Gpu, gpus_per_node: int, network_gbits: float | None = None) -> Links:
        """Return the usual ones for a kind of GPU, or with the network that is given."""
        between = device.network_gbits if network_gbits is None else network_gbits
        return cls(gpus_per_node, device.link_gbs, between / 8)

    def in_a_node(self, plan: Plan, group: str) -> int:
        """How many ranks of a group share a node.

        Those of a tensor-parallel group are neighbours, then those that shard a copy.
        """
        split, copy = plan.tensor_parallel, plan.tensor_parallel * plan.shard
        stride, reach = {
            "tensor": (1, split),
            "shard": (split, copy),
            "replicate": (copy, plan.ranks),
            "all": (1, plan.ranks),
        }[group]
        return max(1, math.gcd(reach, self.gpus_per_node) // stride)

    def seconds(self, plan: Plan, message: Message) -> float:
        """Time of one such message."""
        local = self.in_a_node(plan, message.group)
        nodes = message.ranks // local
        passes = 2 if message.kind == "all-reduce" else 1
        across = passes * (nodes - 1)
        inside = passes * (message.ranks - 1) - across
        if nodes == 1:
            bandwidth = self.within_gbs
        elif local == 1:
            bandwidth = self.between_gbs
        else:
            # Rings leave a node by every GPU of the group.
            bandwidth = min(self.within_gbs, self.between_gbs * local)
        one_way = message.sent / message.count / (REACHED * bandwidth * 1e9)
        nvlink = self.within_gbs > PCIE_GBS
        return min(
            (each.base + inside * (each.nvlink if nvlink else each.pcie) + across * each.network)
            / 1e6
            + one_way / each.share
            for each in PROTOCOLS
        )


# A step's time -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flops:
    """Of one token on one rank: a layer's and the output's, forward and backward."""

    forward: float
    backward: float
    output_forward: float
    output_backward: float

    @classmethod
    def of(cls, plan: Plan) -> Flops:
        """Count as `launcher.estimate.flops_a_token` does, and recomputed layers once more."""
        shape, split = plan.shape, plan.tensor_parallel
        matrices = 2.0 * sum(a * b for a, b in shape.matrices.values())
        adapter = 2.0 * sum(plan.adapter(name, local=False) for name in plan.lora_targets)
        attention = 4 * shape.query * (plan.length + 1) / 2
        last = 2.0 * plan.adapter("output", local=False) if plan.lora_output else 0.0
        each = 2 if plan.is_full else 1
        forward = matrices + adapter + attention
        again = {"none": 0.0, "op": 0.0, "full": 1.0}.get(plan.checkpointing)
        again = 1 / int(plan.checkpointing) if again is None else again
        return cls(
            forward / split,
            (each * matrices + 2 * (adapter + attention) + again * forward) / split,
            (2 * shape.embedding + last) / split,
            (2 * each * shape.embedding + 2 * last) / split,
        )


@dataclass(frozen=True)
class Step:
    """Seconds of one optimizer step, and what of them is not computing."""

    seconds: float
    tensor_parallel_s: float
    sharding_s: float

    @property
    def efficiency(self) -> float:
        """The share of the time in which a GPU computes."""
        return 1 - (self.tensor_parallel_s + self.sharding_s) / self.seconds


@dataclass(frozen=True)
class Traffic:
    """Seconds of messages: those that a layer waits for, and those beside it by kind of link."""

    waited: float = 0.0
    within: float = 0.0
    between: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.waited + other.waited, self.within + other.within, self.between + other.between
        )

    def __truediv__(self, parts: int) -> Traffic:
        return Traffic(self.waited / parts, self.within / parts, self.between / parts)

    @property
    def fetched(self) -> float:
        """Of those that could go on beside a layer, when there is none."""
        return self.within + self.between

    def beside(self, computing: float) -> float:
        """A layer that computes for so long, and sends all of this meanwhile."""
        return max(computing + self.waited, self.waited + self.within, self.between)


def _traffic(plan: Plan, links: Links) -> dict[str, Traffic]:
    """A step's messages by when they are sent."""
    found: dict[str, Traffic] = defaultdict(Traffic)
    for message in messages(plan):
        if message.what == "agreement":
            continue  # over the CPU, while the GPU still has work to do
        took = message.count * links.seconds(plan, message)
        local = links.in_a_node(plan, message.group) == message.ranks
        kind = "waited" if message.waits else "within" if local else "between"
        found[message.when] += Traffic(**{kind: took})
    return found


def step(plan: Plan, device: Gpu, links: Links, mfu: float) -> Step:
    """Return the time of a step in which computing runs at `mfu` of the GPU's peak."""
    depth, micro_steps = plan.shape.layers, plan.accumulation
    reductions = micro_steps if plan.sync_each else 1
    rate = device.bf16_tflops * 1e12 * mfu / plan.tokens
    flops = Flops.of(plan)
    forward, backward = flops.forward / rate, flops.backward / rate
    if plan.checkpointing == "op":
        # What is made again is read once and written once.
        backward += 2 * recomputed_elements(plan) / (device.memory_bandwidth_gbs * 1e9)
    ends = (flops.output_forward + flops.output_backward) / rate
    computing = micro_steps * (depth * (forward + backward) + ends)

    sent = _traffic(plan, links)
    fore = sent["forward"] / (depth * micro_steps)
    back = (sent["backward"] + sent["recompute"]) / (depth * micro_steps)
    reduced = sent["reduce"] / (depth * reductions)
    # The first layer's weights come before anything is computed, the last one fetches none; so in
    # backward, where the last reduction finds nothing to hide behind either.
    seconds = computing + sum(t.waited + t.fetched for t in (sent[w] for w in ENDS))
    seconds += micro_steps * (fore.fetched + fore.waited + back.fetched + back.waited)
    seconds += micro_steps * (depth - 1) * (fore.beside(forward) - forward)
    seconds += (micro_steps - reductions) * (depth - 1) * (back.beside(backward) - backward)
    seconds += reductions * (depth - 1) * ((back + reduced).beside(backward) - backward)
    seconds += reductions * (reduced.waited + reduced.fetched)
    waited = sum(traffic.waited for when, traffic in sent.items() if when != "step")
    return Step(seconds, waited, seconds - computing - waited)


def rate(plan: Plan, took: Step) -> float:
    """Return the tokens a second and GPU of a step."""
    tokens = plan.samples_a_step * plan.tokens / plan.batch
    return tokens / took.seconds / plan.ranks


# Layouts -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """One way to lay a recipe over so many nodes, and what is predicted of it."""

    name: str
    overrides: str
    batch: int
    nodes: int
    peak_gib: float
    fits: bool
    seconds: float
    tokens_per_second_per_gpu: float
    efficiency: float
    tensor_parallel_s: float
    sharding_s: float


def layout(plan: Plan, nodes: int, device: Gpu, links: Links, mfu: float) -> Layout:
    """Return what is predicted of a plan for these nodes."""
    took, peak = step(plan, device, links, mfu), Estimate(plan).peak / GIB
    return Layout(
        name=name(plan),
        overrides=f"tensor_parallel_dim={plan.tensor_parallel} "
        f"data_parallel_replicate_dim={plan.replicate} batch_size={plan.batch}",
        batch=plan.batch,
        nodes=nodes,
        peak_gib=round(peak, 3),
        fits=peak <= device.usable_gib,
        seconds=took.seconds,
        tokens_per_second_per_gpu=rate(plan, took),
        efficiency=took.efficiency,
        tensor_parallel_s=took.tensor_parallel_s,
        sharding_s=took.sharding_s,
    )


def name(plan: Plan) -> str:
    """Return what a layout is called: TP8 x FSDP, HSDP, ..."""
    split = f"TP{plan.tensor_parallel}" if plan.tensor_parallel > 1 else ""
    data = "copies" if plan.replicate > 1 else ""
    if plan.shard > 1:
        data = "HSDP" if plan.replicate > 1 else "FSDP"
    return " x ".join(part for part in (split, data) if part) or "one GPU"


def layouts(plan: Plan, gpus_per_node: int, nodes: int) -> Iterator[Plan]:
    """Yield what is compared: layers whole or split, sharded over all nodes or in each of them.

    The simplest come first.
    Each GPU has as many rows as in the plan, or a group one row where that would be less.
    """
    ranks = nodes * gpus_per_node
    for split in SPLITS:
        for copies in sorted({1, nodes}):
            if gpus_per_node % split or layout_faults(plan.shape, ranks, split, copies):
                continue
            if split > 1 and plan.dropout:
                continue  # the trainer refuses it
            yield replace(
                plan,
                shard=ranks // split // copies,
                replicate=copies,
                tensor_parallel=split,
                batch=max(1, round(plan.batch * split / plan.tensor_parallel)),
            )


class Scaling:
    """What is predicted of a recipe: its own step, and other layouts on more nodes."""

    def __init__(self, report: Report, network_gbits: float | None = None) -> None:
        self.plan, self.device, self.mfu = report.plan, report.device, report.mfu
        self.nodes, gpus_per_node = report.nodes, report.gpus_per_node
        self.links = Links.of(self.device, gpus_per_node, network_gbits)
        self.messages = messages(self.plan)
        self.own = self._predict(self.plan, self.nodes)
        self.compared = [
            self._predict(candidate, nodes)
            for nodes in NODES
            for candidate in layouts(self.plan, gpus_per_node, nodes)
        ]

    def _predict(self, plan: Plan, nodes: int) -> Layout:
        return layout(plan, nodes, self.device, self.links, self.mfu)

    def choice(self, nodes: int) -> Layout | None:
        """Return the simplest layout that fits and is within 1 % of the fastest; None for none."""
        fitting = [each for each in self.compared if each.nodes == nodes and each.fits]
        rates = [each.tokens_per_second_per_gpu for each in fitting]
        return next(
            (each for each, rate in zip(fitting, rates, strict=True) if rate >= 0.99 * max(rates)),
            None,
        )

    def as_json(self) -> dict[str, Any]:
        """Return everything; sizes in bytes, times in seconds."""
        return {
            "basis": "predicted, not measured",
            "links": asdict(self.links),
            "own": asdict(self.own),
            "sent_bytes": sum(message.sent for message in self.messages),
            "messages": [
                asdict(message)
                | {"sent": message.sent, "seconds_each": self.links.seconds(self.plan, message)}
                for message in self.messages
            ],
            "compared": [asdict(each) for each in self.compared],
            "choice": {
                str(nodes): each.overrides for nodes in NODES if (each := self.choice(nodes))
            },
        }

    def lines(self) -> Iterator[str]:
        """Yield it as a person reads it."""
        own, links = self.own, self.links
        yield (
            f"A GPU sends in a step of this layout, {own.name} on {self.nodes} x "
            f"{links.gpus_per_node} GPUs; predicted, not measured"
        )
        yield from self._message_lines()
        yield (
            f"a step {own.seconds:.3g} s, {own.tokens_per_second_per_gpu:,.0f} tokens/s/GPU: "
            f"{100 * own.efficiency:.0f} % computing, waiting for tensor parallelism "
            f"{own.tensor_parallel_s:.2g} s, for weights and gradients {own.sharding_s:.2g} s"
        )
        yield ""
        yield (
            "Tokens/s/GPU by nodes, and the share of the time that is computing; predicted, not "
            "measured; * does not fit"
        )
        yield (
            f"at {100 * self.mfu:.0f} % of {self.device.name}'s peak while computing, recomputed "
            f"layers included; {links.within_gbs:g} GB/s within a node, "
            f"{8 * links.between_gbs:g} Gbit/s a GPU between nodes"
        )
        yield from self._compared_lines()

    def _message_lines(self) -> Iterator[str]:
        totals: dict[tuple[str, str, int], list[float]] = {}
        for message in self.messages:
            total = totals.setdefault((message.what, message.kind, message.ranks), [0, 0, 0])
            total[0] += message.count
            total[1] += message.sent
            total[2] += message.count * self.links.seconds(self.plan, message)
        for (what, kind, ranks), (count, sent, took) in totals.items():
            if took >= 0.0005:
                yield (
                    f"  {what:<24} {kind:<14} of {ranks:>4} {int(count):>6} x "
                    f"{sent / count / 2**20:>9.3f} MiB {sent / GIB:>9.2f} GiB {took:>8.3f} s"
                )

    def _compared_lines(self) -> Iterator[str]:
        yield f"{'LAYOUT':<14}{'BATCH':>5}" + "".join(f"{nodes:>13}" for nodes in NODES)
        for title in dict.fromkeys(each.name for each in self.compared):
            cells = {each.nodes: each for each in self.compared if each.name == title}
            batch = next(iter(cells.values())).batch
            yield f"{title:<14}{batch:>5}" + "".join(_cell(cells.get(nodes)) for nodes in NODES)
        yield "the simplest that fits and is within 1 % of the fastest:"
        for nodes in NODES:
            if best := self.choice(nodes):
                yield f"  on {nodes:>2} nodes  {best.name:<13} {best.overrides}"


def _cell(found: Layout | None) -> str:
    if found is None:
        return f"{'-':>13}"
    mark = " " if found.fits else "*"
    return f"{found.tokens_per_second_per_gpu:>7,.0f}{mark}{100 * found.efficiency:>3.0f} %"
