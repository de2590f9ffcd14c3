"""The host's waits for the GPU, step by step: python -m tests.benchmarks.waits METHOD TRAIN_YAML

For the null GPU, whose runtime counts them. METHOD is one of trainer.train's, such as sft.
"""

import ctypes
import json
import os
import sys
import traceback
import warnings
from itertools import pairwise
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.null_gpu.__main__ import LIBRARY
from trainer import train
from trainer.start import leave


def counted() -> list[int]:
    """Waits, copies to memory of the host that is not pinned, and copies from it, until now."""
    numbers = (ctypes.c_long * 3)()
    ctypes.CDLL(LIBRARY).null_gpu_counts(numbers)
    return list(numbers)


def main(method: str, path: str) -> int:
    """Train; the last line is JSON: the numbers of each step after the first, and bytes at the end.

    A step is from one call of the optimizer to the next.
    """
    seen: list[list[int]] = []
    register_optimizer_step_post_hook(lambda *_: seen.append(counted()))
    status: int = train.main([method, path])
    steps = [[b - a for a, b in zip(*pair, strict=True)] for pair in pairwise(seen)]
    print(json.dumps({"steps": steps, "left": torch.cuda.memory_allocated()}), flush=True)
    return status


def show(message: Any, *_: Any) -> None:
    """Print where a wait that torch knows of comes from."""
    frames = traceback.extract_stack()[:-1]
    places = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-12:]]
    if "synchroniz" in str(message):
        print("\n  ".join(["waits in", *reversed(places)]), flush=True)


if __name__ == "__main__":
    if "SHOW_WAITS" in os.environ:
        warnings.showwarning = show
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
    leave(main(*sys.argv[1:]))
