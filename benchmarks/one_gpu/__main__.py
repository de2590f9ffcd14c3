"""Correctness and speed on one GPU, in minutes: python -m benchmarks.one_gpu correct|speed

Two calls write one file, <out>/one_gpu_<card>_<date>.json, and a page beside it. Each part is a
process with a time limit, and its result is written as it ends. A part without time is written
down as dropped. --tiny --device cpu tries all of it on any machine. Nothing is downloaded.
"""

import argparse
import datetime
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import train
from benchmarks.one_gpu import correct, speed
from benchmarks.one_gpu.parts import ROOT, Call

RUN = {"correct": correct.run, "speed": speed.run}
BUDGET_S = {"correct": 255.0, "speed": 400.0}
# Offline, and as in a job.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "NODE_CHECK": "no",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "TOKENIZERS_PARALLELISM": "false",
}


def argument_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.one_gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=tuple(RUN))
    parser.add_argument("--tiny", action="store_true", help="small models, few steps")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", metavar="REGEX", help="names of cases and parts")
    parser.add_argument("--budget-s", type=float, help="seconds for everything (255, 400)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--work", type=Path, help="folder for models and runs: 20 GB for speed")
    return parser


def main(arguments: list[str]) -> int:
    """Run the command; exit status 0, or 1 if the device is missing."""
    options = argument_parser().parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.device_count():
        print("error: torch sees no GPU: try it with --tiny --device cpu", file=sys.stderr)
        return 1
    card = options.device
    if card == "cuda":
        # In a process of its own, because CUDA takes memory of the GPU.
        command = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name(0))"]
        card = subprocess.check_output(command, text=True).strip()
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    name = re.sub("[^a-z0-9]+", "_", card.lower()).strip("_")
    path = options.out.absolute() / f"one_gpu_{name}_{today}.json"
    base = options.work or Path(tempfile.gettempdir())
    base.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"one-gpu-{options.what}-", dir=base.absolute()))
    os.environ |= ENVIRONMENT | {"COOKBOOK_ROOT": str(work / "root")}
    call = Call(path, work, options, options.budget_s or BUDGET_S[options.what])
    line = shlex.join(["python", "-m", "benchmarks.one_gpu", *arguments])
    call.note(options.what, card=card, command=f"`{line}`", commit=train.commit(), date=today)
    call.note(options.what, torch=torch.__version__, budget_s=call.budget_s)
    try:
        RUN[options.what](call)
    finally:
        call.note(options.what, seconds=round(time.monotonic() - call.began, 1))
        shutil.rmtree(work, ignore_errors=True)
    print(f"written: {path} and {path.with_suffix('.md').name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
