"""Hardware, versions and measured limits of this machine: python -m benchmarks.machine cuda|cpu

Prints JSON. The limits are the speeds of a large matrix product and of a large copy, measured now.
It runs in its own process, so that it leaves nothing in GPU memory.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.peers.engine import version

PACKAGES = ("torch", "torchtune", "torchao", "transformers", "peft", "triton")
# Matrix size and bytes copied: so large that launch overhead does not matter.
SIDE = {"cuda": 8192, "cpu": 512}
COPY_BYTES = {"cuda": 4 * 2**30, "cpu": 2**28}
WARMUPS, ROUNDS = 3, 10


def describe(device: str) -> dict[str, Any]:
    """Hardware, versions and measured limits.

    matmul_tflops: 2 n^3 FLOPs divided by the median time of an [n, n] @ [n, n] product of normal
    random numbers, by dtype. copy_gbs: 10^9 bytes per second, bytes read plus bytes written.
    """
    gpu = torch.cuda.get_device_properties(0) if device == "cuda" else None
    return {
        "device": device,
        "gpu": gpu and gpu.name,
        "gpus": torch.cuda.device_count() if gpu else 0,
        "gpu_memory_gib": gpu and round(gpu.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "driver": _driver() if gpu else None,
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "peak_bf16_tflops": _peak_tflops() if gpu else None,
        "matmul_tflops": {
            name: round(matmul_tflops(device, dtype), 3)
            for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
        },
        "copy_gbs": round(copy_gbs(device), 1),
    }


def matmul_tflops(device: str, dtype: torch.dtype) -> float:
    """TFLOP/s of a large square matrix product."""
    side = SIDE[device]
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * side**3 / _seconds(lambda: torch.mm(left, right, out=out), device) / 1e12


def copy_gbs(device: str) -> float:
    """GB/s of a large copy within device memory."""
    source = torch.ones(COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds(lambda: target.copy_(source), device) / 1e9


def _seconds(task: Callable[[], Any], device: str) -> float:
    """Median time of a task in seconds."""
    times = []
    for _ in range(WARMUPS + ROUNDS):
        _synchronize(device)
        began = time.perf_counter()
        task()
        _synchronize(device)
        times.append(time.perf_counter() - began)
    return median(times[WARMUPS:])


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _peak_tflops() -> float | None:
    from trainer.metrics import peak_tflops

    return peak_tflops(torch.device("cuda"))


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    words = path.read_text().split() if path.exists() else []
    return next((word for word in words if word.count(".") >= 1 and word[0].isdigit()), None)


if __name__ == "__main__":
    print(json.dumps(describe(sys.argv[1])))
