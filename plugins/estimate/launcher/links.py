"""How long messages between GPUs take, by collective."""

from dataclasses import dataclass
from math import gcd

from launcher.gpus import Gpu
from plugins.estimate.launcher.reached import REACHED

# Seconds of a collective, of its step within a node and of one between nodes: those of NCCL's
# protocol Simple over NVLink (NCCL, src/graph/tuning.cc, ncclTopoTuneModel).
BASE_S, WITHIN_S, BETWEEN_S = 8.4e-6, 3.4e-6, 9.6e-6


@dataclass(frozen=True)
class Links:
    """How the GPUs are connected: 10^9 bytes per second of each, in one direction."""

    gpus_per_node: int
    # To the others of its node.
    within_gbs: float
    # To other nodes.
    between_gbs: float

    @classmethod
    def of(cls, gpu: Gpu, gpus_per_node: int, network_gbits: float | None = None) -> "Links":
        """Return the usual links of a kind of GPU, or with the network that is given."""
        between = gpu.network_gbits if network_gbits is None else network_gbits
        return cls(gpus_per_node, gpu.link_gbs, between / 8)

    def ring_s(self, sent: float, ranks: int, stride: int = 1, passes: int = 1) -> float:
        """Seconds in which each of the ranks, `stride` apart, sends `sent` bytes over a ring.

        An all-gather or reduce-scatter of a whole of n bytes sends n (ranks - 1) / ranks in one
        pass, an all-reduce twice that in two (Patarasuk and Yuan 2009).
        """
        if ranks == 1 or not sent:
            return 0.0
        local = max(1, gcd(ranks * stride, self.gpus_per_node) // stride)
        across = ranks // local - 1
        # Rings leave a node by every GPU of the group.
        gbs = self.between_gbs * local if across else self.within_gbs
        gbs = min(gbs, self.within_gbs) if local > 1 else gbs
        latency = BASE_S + passes * ((ranks - 1 - across) * WITHIN_S + across * BETWEEN_S)
        return latency + sent / (REACHED * gbs * 1e9)

    def all_to_all_s(self, size: float, ranks: int) -> float:
        """Seconds in which neighbours send each other their parts of these bytes.

        What stays in the node and what leaves it go at the same time, over links of their own:
        NCCL makes it of sends and receives (its user guide, "Point-to-point communication").
        """
        local = gcd(ranks, self.gpus_per_node)
        within = (local - 1) / self.within_gbs
        between = (ranks - local) / self.between_gbs
        return BASE_S + max(within, between) * size / ranks / (REACHED * 1e9)
