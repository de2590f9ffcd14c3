"""An evaluation on null GPUs: torchrun ... -m tests.benchmarks.evaluated TRAIN_YAML

There is no NCCL: gloo carries all messages. Each rank prints in one line what torch's allocator has
used of each GPU.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from plugins.evaluate import main as evaluate


def main(arguments: list[str]) -> int:
    """Exit status of the evaluation."""
    dist.init_process_group = partial(_over_gloo, dist.init_process_group)
    status = evaluate.main(arguments)
    peaks = [torch.cuda.max_memory_allocated(each) for each in range(torch.cuda.device_count())]
    print(
        f"used {[bool(peak) for peak in peaks]}, current {torch.cuda.current_device()}", flush=True
    )
    return status


def _over_gloo(start: Callable[..., None], backend: str, **more: Any) -> None:
    start("gloo", **more)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
