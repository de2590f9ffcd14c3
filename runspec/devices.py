"""The GPUs that a node has for a process, whatever torch makes of them."""

import os
from pathlib import Path

FOLDER = Path("/dev")
# Of a GPU's memory the CUDA context, NCCL's buffers, kernels' workspaces and the allocator's gaps
# take a part that no formula gives: this much is reserved for them. An assumption.
RESERVED_GIB, RESERVED_SHARE = 2.0, 0.05
# Set by Slurm in a job that was given GPUs.
_GIVEN = ("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS")


def gpus() -> list[str]:
    """Return the device files of the GPUs that are for this process.

    A Slurm job without GPUs may run on a node that has some.
    """
    if "SLURM_JOB_ID" in os.environ and not any(os.environ.get(name) for name in _GIVEN):
        return []
    devices = [*sorted(FOLDER.glob("nvidia[0-9]*")), *sorted(FOLDER.glob("kfd"))]
    return [str(path) for path in devices]
