"""Checks a node before ranks start on it: python -P -m slurm.ready

Called by slurm/node.sh on every node of an attempt. An unhealthy node writes a record, from which
the job script excludes the node. It takes less than a second; the ranks themselves then run a
matrix product and an all-reduce (trainer/parallel/fitness.py).
"""

import csv
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from runspec import files
from runspec.failure import fault
from slurm import allocation
from slurm.faults import BAD_NODE

# A GPU with more than this share of its memory in use has other processes, possibly ranks of an
# earlier start, which stop within seconds.
_IN_USE, _IS_IN_USE = 0.1, "is in use: "
_FREED_S = 30.0
_QUERY = "index,uuid,memory.used,memory.total,ecc.errors.uncorrected.volatile.total"
_DISK_BYTES = 2**30


def faults() -> list[str]:
    """Return the reasons why this node is unhealthy, one line each."""
    return [*_disk(), *_gpus()]


def gpu_faults(table: str, visible: str, wanted: int) -> Iterator[str]:
    """Yield the faults of the GPUs of a job on this node.

    Args:
        table: the output of nvidia-smi for _QUERY, as CSV.
        visible: CUDA_VISIBLE_DEVICES; "" means all.
        wanted: number of GPUs that the ranks need.
    """
    rows = [row for row in csv.reader(table.splitlines(), skipinitialspace=True) if len(row) == 5]
    chosen = visible.split(",") if visible else []
    if any(name.startswith("MIG-") for name in chosen):
        return  # MIG instances: the table has whole GPUs only
    if chosen:
        rows = [row for row in rows if row[0] in chosen or row[1] in chosen]
    if len(rows) < wanted:
        yield f"nvidia-smi shows {len(rows)} of the {wanted} GPUs of this job"
    for index, _, used, total, errors in rows:
        if errors.isdigit() and int(errors):
            yield f"GPU {index} has {errors} uncorrected ECC errors since its last reset"
        if used.isdigit() and total.isdigit() and int(used) > _IN_USE * int(total):
            yield f"GPU {index} {_IS_IN_USE}{used} of {total} MiB of its memory are used"


def _gpus() -> Iterator[str]:
    given = os.environ.get("SLURM_GPUS_ON_NODE", "")
    # GPUs of other vendors are only checked by the ranks.
    if not given.isdigit() or not int(given) or shutil.which("nvidia-smi") is None:
        return
    query = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    status, output = allocation.said(query, 20)
    if status:
        yield f"nvidia-smi fails: {(output.strip().splitlines() or ['no answer in 20 s'])[-1]}"
        return
    visible, wanted = os.environ.get("CUDA_VISIBLE_DEVICES", ""), os.environ["RANKS_PER_NODE"]
    yield from gpu_faults(output, visible, int(wanted))


def _disk() -> Iterator[str]:
    folder = os.environ.get("TMPDIR", "/tmp")
    try:
        disk = os.statvfs(folder)
    except OSError as error:
        yield f"{folder} cannot be used: {error.strerror}"
        return
    free = disk.f_bavail * disk.f_frsize
    if free < _DISK_BYTES:
        yield f"{folder} has {free / 2**20:.0f} MiB of free space, and compiled kernels need 1 GiB"
    if disk.f_files and not disk.f_favail:
        yield f"{folder} has no free inodes"


def main() -> int:
    node, logs = os.environ["NODE_NAME"], Path(os.environ["LOGS"])
    reasons, deadline = faults(), time.monotonic() + _FREED_S
    while reasons and all(_IS_IN_USE in line for line in reasons) and time.monotonic() < deadline:
        time.sleep(1)
        reasons = faults()
    if not reasons:
        return 0
    message = f"node {node} is not fit for training: {'; '.join(reasons)}"
    print(f"cookbook: fault on node {node}: {message}")
    record = fault(message, BAD_NODE, node, permanent=False)
    files.write_json(logs / f"error_node_{os.environ['NODE_RANK']}.json", record)
    return 1


if __name__ == "__main__":
    sys.exit(main())
