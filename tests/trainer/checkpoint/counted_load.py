"""The trainer that prints how many bytes of weights and of checkpoints this rank reads."""

import math
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, LoadPlan

from trainer import train
from trainer.checkpoint import weights


def main(arguments: list[str]) -> int:
    read, restore = weights.read_tensor, FileSystemReader.read_data
    count = restored = 0

    def counted(*given: Any) -> torch.Tensor:
        nonlocal count
        tensor = read(*given)
        count += tensor.nbytes
        return tensor

    def restored_counted(self: FileSystemReader, plan: LoadPlan, *given: Any) -> Any:
        nonlocal restored
        others = (each for each in plan.items if not each.dest_index.fqn.startswith("random"))
        restored += sum(math.prod(each.lengths) for each in others)
        return restore(self, plan, *given)

    weights.read_tensor = counted
    FileSystemReader.read_data = restored_counted  # type: ignore[method-assign]
    try:
        return train.main(["sft", *arguments])
    finally:
        print(f"bytes read: {count}, elements restored: {restored}", flush=True)
