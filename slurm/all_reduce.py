"""Measure an all-reduce over all ranks of a job: torchrun ... slurm/all_reduce.py cpu|cuda

Started by slurm/node_check.sh. Rank 0 prints "@ all_reduce RANKS MIB SECONDS GB_PER_S": the size
of the buffer, the time of one all-reduce, and the bus bandwidth as nccl-tests define it,
2 (n - 1) / n x bytes / time, which does not depend on the number of ranks n.
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

# MiB and rounds: enough to measure the bandwidth; gloo on a slow network still ends within seconds.
_SIZE = {"cuda": (256, 10), "cpu": (16, 3)}


def main(device: str) -> None:
    mib, rounds = _SIZE[device]
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    numbers = torch.full((mib * 2**20 // 4,), rank + 1.0, device=device)
    dist.all_reduce(numbers)
    right = bool((numbers == ranks * (ranks + 1) / 2).all())
    seconds = timed(numbers, rounds)
    if rank == 0 and right:
        bandwidth = 2 * (ranks - 1) / ranks * mib * 2**20 / seconds / 1e9
        print(f"@ all_reduce {ranks} {mib} {seconds:.4f} {bandwidth:.2f}", flush=True)
    dist.destroy_process_group()
    if not right:
        sys.exit(f"rank {rank} on {os.uname().nodename}: error: the sum over all ranks is wrong")


def timed(numbers: torch.Tensor, rounds: int) -> float:
    """Return the seconds of one all-reduce, averaged over rounds."""
    numbers.zero_()
    dist.barrier()
    numbers[0].item()  # waits until the GPU is done
    started = time.monotonic()
    for _ in range(rounds):
        dist.all_reduce(numbers)
    numbers[0].item()
    return (time.monotonic() - started) / rounds


if __name__ == "__main__":
    main(sys.argv[1])
