"""The trainer whose ranks tell each other everything in rounds, as those of large runs do.

With the argument "check" they only gather, and one of them comes late.
"""

import time

import torch.distributed as dist

from trainer import train
from trainer.parallel import world


def main(arguments: list[str]) -> int:
    world.MANY = 2
    return check() if arguments == ["check"] else train.main(["sft", *arguments])


def check() -> int:
    this = world.start("cpu")
    rank, size = this.rank, this.size
    values = [{"rank": each, "text": "x" * 1000 * each} for each in range(size)]
    assert this.gather(values[rank]) == values
    assert this.sum([rank, 0.5]) == [size * (size - 1) / 2, size / 2]
    assert this.max([-rank]) == [0]
    dist.barrier(group=this.cpu_group)
    began = time.monotonic()
    if rank == 1:
        time.sleep(5)
        print(f"{size} ranks agree", flush=True)
        return 0
    this.limit(1)
    try:
        this.gather(None)
    except RuntimeError as error:
        assert time.monotonic() - began < 4, "the limit was not kept"
        print(f"rank {rank}: {type(error).__name__}", flush=True)
        time.sleep(5)
        return 0
    raise AssertionError("a rank that does not come was not noticed")
