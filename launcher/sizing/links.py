"""How long a message takes between the GPUs of a cluster.

NCCL's own estimate of it: latency by steps of the ring and bytes over bandwidth, for the best of
its three protocols (NCCL, src/graph/tuning.cc, ncclTopoTuneModel).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from launcher.sizing.communication import Message
from launcher.sizing.gpus import Gpu
from runspec.layout import Layout

# Of a link's data sheet, what NCCL reaches with large messages. Its developers name 370 of NVLink's
# 450 GB/s on H100 (NVIDIA/nccl-tests issue 212) and 46 to 48 of the 50 of a 400 Gbit/s port (290);
# 32 nodes of eight such ports gave 340 of 400 (NVIDIA/nccl issue 1218). For others an assumption.
REACHED = 0.8
# No PCIe link of the known cards is faster; what is, is NVLink.
PCIE_GBS = 64.0


@dataclass(frozen=True)
class Protocol:
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

        Those of a tensor-parallel group are neighbours, then those that shard a replica.
        """
        split, replica = layout.tensor_parallel, layout.tensor_parallel * layout.shard
        stride, reach = {
            "tensor": (1, split),
            "shard": (split, replica),
            "replicate": (replica, layout.ranks),
            "all": (1, layout.ranks),
        }[group]
        return max(1, math.gcd(reach, self.gpus_per_node) // stride)

    def seconds(self, layout: Layout, message: Message) -> float:
        """Time of one such message."""
        local = self.ranks_per_node(layout, message.group)
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
