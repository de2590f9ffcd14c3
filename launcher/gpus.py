"""The kinds of GPU that configs/gpus.yaml knows: their memory and speed."""

import re
from dataclasses import dataclass
from functools import cache

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
