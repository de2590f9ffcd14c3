"""The kinds of GPU that configs/gpus.yaml knows: memory, speed, and what is reached of it."""

import re
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from launcher import paths, yamlfile
from launcher.errors import UsageFault, nearest
from runspec.devices import RESERVED_GIB, RESERVED_SHARE

DEFAULT = "h100-80"


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU, by its data sheet."""

    name: str
    # A regular expression for the name that the driver gives it.
    match: str
    memory_gib: float
    bf16_tflops: float
    memory_bandwidth_gbs: float
    # To the other GPUs of its node, in one direction.
    link_gbs: float
    # To other nodes, as it is usually connected.
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


# Shares of a data sheet that kernels and links reach ---------------------------------------------

# Of a link's data sheet, what NCCL reaches with large messages. Its developers name 370 of NVLink's
# 450 GB/s on H100 (NVIDIA/nccl-tests issue 212) and 46 to 48 of the 50 of a 400 Gbit/s port (290);
# 32 nodes of eight such ports gave 340 of 400 (NVIDIA/nccl issue 1218). For others an assumption.
REACHED = 0.8


class Reached(NamedTuple):
    """What kernels reach of a GPU's data sheet, as shares."""

    # By large bf16 products.
    products: float
    # By FlashAttention on long rows.
    attention: float
    attention_backward: float
    # Of `products`, by those of experts in one kernel.
    grouped: float
    # Speed of fp8 products, over bf16's.
    fp8: float = 1.7
    # Of the bandwidth, by elementwise kernels.
    memory: float = 0.85
    # Seconds of the host to launch a kernel.
    launch_s: float = 8e-6

    @classmethod
    def of(cls, gpu: Gpu) -> "Reached":
        """Return what is usual on a kind of GPU.

        Cards with more than 400 TFLOP/s are held back by their power, and FlashAttention 2 does
        not use what is new in them, so it is as fast on all: on H100 it reaches 350 to 370 TFLOP/s
        forward and about 290 backward (Shah et al. 2024, arXiv 2407.08608, figures 5 and 6), on
        A100 200 and 180 (Dao 2023, arXiv 2307.08691, figures 4 to 6).
        """
        if gpu.bf16_tflops <= 400:
            return AMPERE
        more = max(1.0, gpu.bf16_tflops / 989.4)
        forward, backward = HOPPER.attention / more, HOPPER.attention_backward / more
        return HOPPER._replace(attention=forward, attention_backward=backward)


HOPPER = Reached(products=0.66, attention=0.37, attention_backward=0.29, grouped=0.6)
AMPERE = Reached(products=0.80, attention=0.65, attention_backward=0.58, grouped=0.6)
