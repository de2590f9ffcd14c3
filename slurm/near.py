"""Prints the CPUs near each rank's GPU, by local rank: python -P -m slurm.near /sys

slurm/node.sh calls it on a node with several NUMA domains, and slurm/rank.sh binds the ranks.
torchrun's --numa-binding ends the run if it cannot bind a rank: if Slurm gave CPUs of other domains
only, in containers without numactl, with torch before 2.9, on CPUs. Standard library only.
"""

import csv
import os
import subprocess
import sys
from pathlib import Path

_QUERY = ["nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader"]
NONE = "-"


def addresses(table: str, visible: str) -> list[str]:
    """PCI addresses of a job's GPUs, in their order for CUDA.

    Args:
        table: the output of nvidia-smi for index, uuid and pci.bus_id, as CSV.
        visible: CUDA_VISIBLE_DEVICES; "" means all.
    """
    rows = [row for row in csv.reader(table.splitlines(), skipinitialspace=True) if len(row) == 3]
    names = {name: row[2].lower()[-len("0000:00:00.0") :] for row in rows for name in row[:2]}
    chosen = visible.split(",") if visible else [row[0] for row in rows]
    return [names[name] for name in chosen if name in names]


def lists(gpus: list[str], allowed: set[int], sysfs: Path) -> list[str]:
    """The CPUs near each of `gpus`, PCI addresses, as taskset takes them; NONE: not to be bound.

    A rank is bound if it keeps at least half of the CPUs that it would have without: the GPUs of
    some nodes (DGX A100) are near every second domain only.

    Args:
        allowed: CPUs of this job.
    """
    domains = [_read(sysfs / "bus/pci/devices" / gpu / "numa_node") for gpu in gpus]
    found = []
    for domain in domains:
        near = allowed & _numbers(_read(sysfs / f"devices/system/node/node{domain}/cpulist"))
        enough = 2 * len(near) * len(gpus) >= len(allowed) * domains.count(domain)
        found.append(",".join(map(str, sorted(near))) if enough else NONE)
    return found


def _numbers(text: str) -> set[int]:
    """Of the kernel's lists, such as 0-3,8."""
    ranges = (part.partition("-") for part in text.split(",") if part)
    return {n for first, _, last in ranges for n in range(int(first), int(last or first) + 1)}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def main() -> None:
    done = subprocess.run(_QUERY, stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = addresses(done.stdout.decode(errors="replace"), visible)
    gpus = gpus[: int(os.environ["RANKS_PER_NODE"])]
    print(*lists(gpus, os.sched_getaffinity(0), Path(sys.argv[1])))


if __name__ == "__main__":
    main()
