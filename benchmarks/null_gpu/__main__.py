"""Run a command on an emulated GPU that has memory but computes nothing ("null GPU").

    python -m benchmarks.null_gpu python -m benchmarks.train --device cuda \\
        --workload llama1b_full --peers ours:max_non_finite_steps=9223372036854775807

torch, torchtune, Triton and the command see an H100. Real are: all Python code, the operators that
torch dispatches and their order, torch's CUDA allocator with its memory peaks, kernels compiled for
sm_90, and the host time of a step. Not real are: all values that kernels would compute, so also
losses and everything that depends on them, and all device times. What is copied to the host is
zeros. There is no cuDNN and no NCCL. Copies larger than 1 MiB are not executed.
NULL_GPU_CAPABILITY=80 is another compute capability than an H100's, for other kernels, with the
shared memory of GPUs that have it. NULL_GPU_COUNT=2 shows two GPUs, each with its own memory.

It needs a machine without a GPU, torch built for CUDA 13 (pip's default on Linux), and g++.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("runtime.cpp")
# The name of the driver library, which torch and Triton load.
LIBRARY = "libcuda.so.1"


def build(folder: Path) -> Path:
    """Compile the null GPU into `folder`; returns the path of the library."""
    nvidia, triton = (_folder(name) for name in ("nvidia", "triton"))
    includes = [nvidia / "cu13/include", triton / "backends/nvidia/include"]
    library = folder / LIBRARY
    compiler = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", f"-Wl,-soname,{LIBRARY}"]
    # Some headers are missing in CUDA's wheel; Triton's wheel has an older version of them.
    compiler += [f"-I{includes[0]}", f"-idirafter{includes[1]}"]
    subprocess.run([*compiler, str(SOURCE), "-o", str(library), "-ldl"], check=True)
    for name in ("libcuda.so", "libnvidia-ml.so.1"):
        (folder / name).symlink_to(LIBRARY)
    return library


def _folder(package: str) -> Path:
    return Path(next(iter(importlib.util.find_spec(package).submodule_search_locations)))


def missing() -> str | None:
    """Why the null GPU cannot run on this machine; None if it can."""
    import torch

    if not (torch.version.cuda or "").startswith("13."):
        return (
            f"torch {torch.__version__} is not built for CUDA 13: install a CUDA 13 build of torch"
        )
    if torch.cuda.is_available():
        return "this machine has a GPU: run the command without benchmarks.null_gpu"
    if not shutil.which("g++"):
        return "g++ is not installed: install it (Debian, Ubuntu: apt-get install g++)"
    return None


def main(command: list[str]) -> int:
    """Run `command` on the null GPU; returns its exit status."""
    if not command or command[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    if reason := missing():
        print(f"error: {reason}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="null-gpu-") as folder:
        library = build(Path(folder))
        settings = {
            "LD_PRELOAD": str(library),
            "LD_LIBRARY_PATH": folder,
            # Ranks would find that products are wrong.
            "NODE_CHECK": "no",
            "TRITON_LIBCUDA_PATH": folder,
            # Kernels compiled here must not get into the caches that real GPUs use.
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        }
        return subprocess.run(command, env=os.environ | settings).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
