"""Run a command on a GPU that holds memory and computes nothing, where there is none.

    python -m benchmarks.null_gpu python -m benchmarks.train --device cuda \\
        --workload llama1b_full --peers ours:max_non_finite_steps=9223372036854775807

torch, torchtune, Triton and the command take it for an H100. What is real: all Python, what torch
dispatches and in which order, its allocator with every peak of memory, kernels compiled for sm_90,
and the time that the host takes for a step. What is not: every number that a kernel would compute,
and with it losses, whatever depends on them, and all time of the device. There is no cuDNN, no
NCCL and no second GPU, and what is larger than 1 MiB is not copied either.

It needs a build of torch for CUDA 13, as pip installs on Linux, and g++.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("runtime.cpp")
# That of the driver, which torch's and Triton's compiled code look for.
LIBRARY = "libcuda.so.1"


def build(folder: Path) -> Path:
    """Compile the null GPU into `folder`; the library."""
    own, triton = (_folder(name) for name in ("nvidia", "triton"))
    includes = [own / "cu13/include", triton / "backends/nvidia/include"]
    library = folder / LIBRARY
    compiler = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", f"-Wl,-soname,{LIBRARY}"]
    # CUDA's wheel lacks a folder of headers that Triton's has, of an older version.
    compiler += [f"-I{includes[0]}", f"-idirafter{includes[1]}"]
    subprocess.run([*compiler, str(SOURCE), "-o", str(library), "-ldl"], check=True)
    (folder / "libcuda.so").symlink_to(LIBRARY)
    return library


def _folder(package: str) -> Path:
    return Path(next(iter(importlib.util.find_spec(package).submodule_search_locations)))


def missing() -> str | None:
    """Why it cannot be built here; None where it can."""
    import torch

    if not (torch.version.cuda or "").startswith("13."):
        return f"torch {torch.__version__} is no build for CUDA 13: install one to try GPU paths"
    if torch.cuda.is_available():
        return "this machine has a GPU: run the command itself"
    if not shutil.which("g++"):
        return "there is no g++ to build it with"
    return None


def main(command: list[str]) -> int:
    """Run `command` with it; its exit status."""
    if not command or command[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    if lack := missing():
        print(f"error: {lack}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="null-gpu-") as folder:
        library = build(Path(folder))
        settings = {
            "LD_PRELOAD": str(library),
            "LD_LIBRARY_PATH": folder,
            "TRITON_LIBCUDA_PATH": folder,
            # What is compiled here must not be found by who has a GPU.
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        }
        return subprocess.run(command, env=os.environ | settings).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
