"""Whether to train on GPUs or on CPUs, and why GPUs that are there cannot be used."""

import os
import re
from pathlib import Path

import torch

from trainer.errors import ConfigError

DEVICES = Path("/dev")
DRIVER = Path("/proc/driver/nvidia/version")
# Set by Slurm in a job that was given GPUs.
_GIVEN = ("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS")


def choose(device: str) -> str:
    """Return cuda or cpu for `device`: auto, cuda or cpu.

    Raises:
        ConfigError: auto, on a node whose GPUs this torch cannot use. It would train on the CPUs of
            a GPU node, which nobody wants, for hours before anybody sees it.
    """
    if device != "auto":
        return device
    if torch.cuda.is_available():
        return "cuda"
    if gpus := _gpus():
        raise ConfigError(
            f"device: this node has GPUs ({', '.join(gpus)}), and torch {torch.__version__} cannot "
            f"use them: {_why()}; install a build for the driver (bash setup.sh --torch-index URL, "
            "as PyTorch's install page shows it), or set device=cpu to train on CPUs"
        )
    return "cpu"


def _gpus() -> list[str]:
    """The device files of the GPUs that are for this process.

    A Slurm job without GPUs may run on a node that has some.
    """
    if "SLURM_JOB_ID" in os.environ and not any(os.environ.get(name) for name in _GIVEN):
        return []
    found = [*sorted(DEVICES.glob("nvidia[0-9]*")), *sorted(DEVICES.glob("kfd"))]
    return [str(path) for path in found]


def _why() -> str:
    built = torch.version.cuda or torch.version.hip
    if built is None:
        return "it is a build for CPUs"
    driver = re.search(r"Module\s+([\d.]+)", DRIVER.read_text()) if DRIVER.is_file() else None
    shown = f"the driver is {driver[1]}" if driver else "the driver's version cannot be read"
    return f"it is built for {'CUDA' if torch.version.cuda else 'ROCm'} {built}, and {shown}"
