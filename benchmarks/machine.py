"""What this machine is and what it can do at best: python -m benchmarks.machine cuda|cpu

Prints JSON: names, versions, and two ceilings measured now, a large matrix product and a large
copy. It runs in a process of its own, so that nothing stays in the GPU's memory.
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
# Side of the matrices and bytes of the copy: large enough that starting them costs nothing.
SIDE = {"cuda": 8192, "cpu": 1024}
COPY_BYTES = {"cuda": 4 * 2**30, "cpu": 2**28}
WARMUPS, ROUNDS = 3, 10


def describe(device: str) -> dict[str, Any]:
    """Hardware, versions and ceilings.

    matmul_tflops: 2 n^3 operations over the median time of an [n, n] @ [n, n] product of normal
    numbers, by dtype. copy_gbs: 10^9 bytes a second, read and written bytes both counted.
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
    """GB/s of a large copy within the device's memory."""
    source = torch.ones(COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds(lambda: target.copy_(source), device) / 1e9


def _seconds(task: Callable[[], Any], device: str) -> float:
    """Median time of a task."""
    times = []
    for _ in range(WARMUPS + ROUNDS):
        _wait(device)
        began = time.perf_counter()
        task()
        _wait(device)
        times.append(time.perf_counter() - began)
    return median(times[WARMUPS:])


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _peak_tflops() -> float | None:
    from trainer.flops import peak_tflops

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
