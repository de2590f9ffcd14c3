"""The kinds of GPU that configs/gpus.yaml knows: memory, peak, and what their links take."""

import re
from dataclasses import dataclass
from functools import cache
from math import gcd

from launcher import paths, yamlfile
from launcher.errors import UsageFault, nearest
from runspec.devices import RESERVED_GIB, RESERVED_SHARE

DEFAULT = "h100-80"
# The round numbers that cards are sold by.
_LABELS_GB = (24, 40, 48, 80, 94, 96, 141, 144, 180, 186, 192, 256, 288)


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU; match is a regular expression for the name that the driver gives it."""

    name: str
    match: str
    memory_gib: float
    bf16_tflops: float
    memory_bandwidth_gbs: float
    link_gbs: float
    network_gbits: float

    @property
    def is_amd(self) -> bool:
        """Whether it needs torch's build for ROCm."""
        return self.name.startswith("mi")

    @property
    def usable_gib(self) -> float:
        """Memory without the reserved part."""
        return self.memory_gib - RESERVED_GIB - RESERVED_SHARE * self.memory_gib


@cache
def known() -> dict[str, Gpu]:
    """Return the kinds of GPU by name, in the file's order."""
    return {name: Gpu(name, **facts) for name, facts in yamlfile.load(paths.GPUS).items()}


def by_name(name: str | None) -> Gpu:
    """Return the kind of GPU with this name; UsageFault lists those that are known."""
    name = name or DEFAULT
    if name not in known():
        raise UsageFault(
            f"there is no GPU {name!r}{nearest(name, known())} in configs/gpus.yaml: choose one of "
            f"{', '.join(known())}"
        )
    return known()[name]


def by_label(label: str) -> Gpu | None:
    """Return the first kind that a name of a site's or a driver's fits, None if none does.

    None for an instance of a GPU (MIG), whose name has the whole GPU's.
    """
    if " MIG " in label:
        return None
    for gpu in known().values():
        if label.lower() == gpu.name or re.search(gpu.match, label, re.IGNORECASE):
            return gpu
    return None


def smallest(gib: float) -> str | None:
    """Return the label of the smallest memory in which gib fits, such as 80 GB; None for none."""
    fitting = [gpu.memory_gib for gpu in known().values() if gib <= gpu.usable_gib]
    if not fitting:
        return None
    return f"{min(_LABELS_GB, key=lambda label: abs(label - min(fitting)))} GB"


# Links -------------------------------------------------------------------------------------------

# Of a link's data sheet, what NCCL reaches with large messages. Its developers name 370 of NVLink's
# 450 GB/s on H100 (NVIDIA/nccl-tests issue 212) and 46 to 48 of the 50 of a 400 Gbit/s port (290);
# 32 nodes of eight such ports gave 340 of 400 (NVIDIA/nccl issue 1218). For others an assumption.
REACHED = 0.8
# Seconds of a collective, of its step within a node and of one between nodes: those of NCCL's
# protocol Simple over NVLink (NCCL, src/graph/tuning.cc, ncclTopoTuneModel).
BASE_S, WITHIN_S, BETWEEN_S = 8.4e-6, 3.4e-6, 9.6e-6


@dataclass(frozen=True)
class Links:
    """How the GPUs are connected: 10^9 bytes per second of each, in one direction.

    within_gbs: to the others of its node. between_gbs: to other nodes.
    """

    gpus_per_node: int
    within_gbs: float
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
