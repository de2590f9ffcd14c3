"""progress.json: how far a run is, for whoever watches it and decides on its next start."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runspec import files, progress
from runspec.files import patient_json


@dataclass
class Progress:
    """state: running, stopped or finished; steps count from 1; losses are None before step 1.

    device is the name of rank 0's GPU, or CPU.

    best_step is the checkpoint with the lowest val_loss; checkpoint_blocked_s are the seconds for
    which this start's training has waited for checkpoints, train_s those in its steps. The rates
    and peaks are of this start alone, and None until it has trained, or if nothing is known
    (MFU and memory on a CPU). reward is that of the last logged step, of methods that have one.
    """

    total_steps: int
    attempt: int
    device: str
    state: str = "running"
    step: int = 0
    checkpoint_step: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    skipped_steps: int = 0
    tokens_per_second_per_gpu: float | None = None
    tflops_per_second_per_gpu: float | None = None
    mfu: float | None = None
    peak_memory_allocated_gb: float | None = None
    peak_memory_reserved_gb: float | None = None
    train_s: float | None = None
    best_step: int | None = None
    best_val_loss: float | None = None
    reward: float | None = None
    checkpoint_blocked_s: float = 0.0

    def write(self, run_dir: Path) -> None:
        """Replace the run's progress.json."""
        progress.write(run_dir, asdict(self))


def recorded(run_dir: Path) -> dict[str, Any]:
    """The run's progress.json as it is; empty if there is none."""
    return patient_json(run_dir / files.PROGRESS) or {}
