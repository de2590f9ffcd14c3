"""Measure the ranks of a node: torchrun --nproc-per-node N slurm/all_reduce.py cpu|cuda

Started by slurm/node_check.sh. Rank 0 prints "@ collective NAME RANKS MIB SECONDS GB_PER_S" of an
all-reduce and an all-gather at two sizes: the size of the buffer, the time of one of them, and the
bus bandwidth as nccl-tests define it, 2 (n - 1) / n x bytes / time and (n - 1) / n x bytes / time,
which do not depend on the number of ranks n. Then "@ product M K N TFLOPS" of bf16 matrix products
on the slowest rank.
"""

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

# A layer's gather and a small message: gloo on a slow network still ends within seconds.
_MIB = {"cuda": (256, 8), "cpu": (16, 1)}
_ROUNDS = {"cuda": 10, "cpu": 3}
# Products of Llama 8B's MLP and attention, and a narrow one.
_PRODUCTS = {
    "cuda": ((8192, 4096, 14336), (8192, 4096, 4096), (8192, 4096, 1024)),
    "cpu": ((512, 512, 512),),
}


def main(device: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    numbers = torch.full((2**20,), rank + 1.0, device=device)
    dist.all_reduce(numbers)
    right = bool((numbers == ranks * (ranks + 1) / 2).all())
    if right:
        collectives(device)
        products(device)
    dist.destroy_process_group()
    if not right:
        sys.exit(f"rank {rank} on {os.uname().nodename}: error: the sum over all ranks is wrong")


def timed(run: Callable[[], object], out: torch.Tensor, rounds: int) -> float:
    """Return the seconds of what writes to `out`, averaged over rounds."""
    out.zero_()
    dist.barrier()
    run()
    out.view(-1)[0].item()  # waits until the GPU is done
    started = time.monotonic()
    for _ in range(rounds):
        run()
    out.view(-1)[0].item()
    return (time.monotonic() - started) / rounds


def collectives(device: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for mib in _MIB[device]:
        part = torch.zeros(mib * 2**20 // 2 // ranks, device=device, dtype=torch.bfloat16)
        whole = torch.zeros(len(part) * ranks, device=device, dtype=torch.bfloat16)
        reduce = partial(dist.all_reduce, whole)
        gather = partial(dist.all_gather_into_tensor, whole, part)
        for name, passes, run in (("all-reduce", 2, reduce), ("all-gather", 1, gather)):
            seconds = timed(run, whole, _ROUNDS[device])
            gbs = passes * (ranks - 1) / ranks * mib * 2**20 / seconds / 1e9
            if rank == 0:
                print(f"@ collective {name} {ranks} {mib} {seconds:.6f} {gbs:.2f}", flush=True)


def products(device: str) -> None:
    # Long enough for the clock that a card under load settles at.
    rounds = 200 if device == "cuda" else _ROUNDS[device]
    for m, k, n in _PRODUCTS[device]:
        one, other = (torch.randn(size, k, device=device, dtype=torch.bfloat16) for size in (m, n))
        out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
        seconds = timed(partial(torch.mm, one, other.T, out=out), out, rounds)
        slowest = torch.tensor(seconds, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(f"@ product {m} {k} {n} {2 * m * k * n / slowest.item() / 1e12:.4f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
