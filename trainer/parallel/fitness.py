"""A matrix product and an all-reduce on every rank before training: are they right, and how fast?

A GPU that computes wrong numbers, or that is much slower than the others, would spoil or slow down
the whole run. This takes about two seconds, of which NCCL needs one anyway to connect the ranks.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from trainer.errors import BadNodeError
from trainer.parallel.world import World

# By kind of device: rows and columns of the matrices, MiB of the all-reduce, rounds of each.
_SIZES = {"cuda": (8192, 64, 10), "cpu": (128, 1, 1)}
# Products are repeated for so long, and the fastest counts: a stall of a GPU is no fault.
_MEASURED_S = {"cuda": 0.5, "cpu": 0.0}
# A GPU at less than this share of the median speed is at fault; good ones differ by a few per cent.
SLOW = 0.6


@dataclass(frozen=True)
class Fitness:
    """What one rank found."""

    node: str
    product_is_right: bool
    # Speed of its matrix product.
    tflops: float
    sum_is_right: bool
    # Bus bandwidth of the all-reduce as nccl-tests define it, 2 (n - 1) / n x bytes / time.
    gb_per_s: float


def check(world: World) -> str:
    """Return one line with the figures of all ranks, "" on CPUs, whose speed says little.

    Raises:
        BadNodeError: on a rank whose numbers are wrong or whose GPU is slow.
        PeerError: on the other ranks.
    """
    if os.environ.get("NODE_CHECK") == "no":
        return ""
    kind = world.device.type
    size, mib, rounds = _SIZES[kind]
    node = os.environ.get("NODE_NAME", "this host")
    measured = world.gather(
        Fitness(node, *_product(world, size, rounds), *_sum(world, mib, rounds))
    )
    fault = faults(measured, compare_speed=kind == "cuda").get(world.rank)
    world.on_all(lambda: _raise(fault))
    if kind == "cpu":
        return ""
    speeds = [each.tflops for each in measured]
    line = f"node check matrix products at {min(speeds):.0f} to {max(speeds):.0f} TFLOP/s"
    bandwidth = min(each.gb_per_s for each in measured)
    return line if world.size == 1 else f"{line}, all-reduce of {mib} MiB at {bandwidth:.0f} GB/s"


def faults(measured: Sequence[Fitness], compare_speed: bool) -> dict[int, str]:
    """Return what is wrong, by rank.

    Where the sum is wrong on all ranks nothing says whose fault it is, and rank 0 tells it.
    """
    usual = np.median([each.tflops for each in measured])
    wrong = [rank for rank, each in enumerate(measured) if not each.sum_is_right]
    if len(wrong) == len(measured):
        wrong = [0]
    texts = {rank: "the sum of an all-reduce over all ranks is wrong" for rank in wrong}
    for rank, each in enumerate(measured):
        if compare_speed and each.tflops < SLOW * usual:
            texts[rank] = (
                f"a matrix product runs at {each.tflops:.0f} TFLOP/s, and at {usual:.0f} on the "
                "median rank"
            )
        if not each.product_is_right:
            texts[rank] = "a matrix product is wrong"
    return {
        rank: f"node {measured[rank].node}, rank {rank}: {text}" for rank, text in texts.items()
    }


def _product(world: World, size: int, rounds: int) -> tuple[bool, float]:
    """Return whether a product of random signs is right, and the speed of products in TFLOP/s.

    The sums of the product's rows and columns are those of its factors (Huang and Abraham 1984).
    """
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    draw = torch.Generator(world.device).manual_seed(world.rank)
    # Random numbers, because a GPU multiplies constants with less power, and so faster.
    left, right = torch.randn(2, size, size, generator=draw, device=world.device).unbind()
    # A sum of 1,024 signs is an integer below 256 (8 standard deviations), which bf16 holds.
    a, b = left[:, :1024].sign(), right[:1024].sign()
    made = (a.to(dtype) @ b.to(dtype)).float()
    is_right = torch.equal(made.sum(1), a @ b.sum(1)) and torch.equal(made.sum(0), a.sum(0) @ b)
    left, right = left.to(dtype), right.to(dtype)
    seconds = _timed(lambda: left @ right, world, rounds, _MEASURED_S[world.device.type])
    return is_right, 2 * size**3 / seconds / 1e12


def _sum(world: World, mib: int, rounds: int) -> tuple[bool, float]:
    """Return whether an all-reduce of known numbers is right, and its bus bandwidth in GB/s."""
    if world.size == 1:
        return True, 0.0
    ranks, count = world.size, mib * 2**20
    numbers = torch.full((count // 4,), world.rank + 1.0, device=world.device)
    dist.all_reduce(numbers)
    right = bool((numbers == ranks * (ranks + 1) / 2).all())
    numbers.zero_()
    seconds = _timed(lambda: dist.all_reduce(numbers), world, rounds)
    return right, 2 * (ranks - 1) / ranks * count / seconds / 1e9


def _timed(work: Callable[[], object], world: World, rounds: int, at_least_s: float = 0.0) -> float:
    """Return the seconds of one round, the least of as many measurements as `at_least_s` holds."""
    clock = _gpu_seconds if world.device.type == "cuda" else _seconds
    began = time.perf_counter()
    seconds = clock(work, rounds)
    while time.perf_counter() - began < at_least_s:
        seconds = min(seconds, clock(work, rounds))
    return seconds / rounds


def _seconds(work: Callable[[], object], rounds: int) -> float:
    started = time.perf_counter()
    for _ in range(rounds):
        work()
    return time.perf_counter() - started


def _gpu_seconds(work: Callable[[], object], rounds: int) -> float:
    """By the GPU's own clock, so that a host that stalls before the end adds nothing."""
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(rounds):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def _raise(fault: str | None) -> None:
    if fault:
        raise BadNodeError(fault)
