"""Loads a model over all ranks and prints by how much the memory of each has grown."""

import os
import re
from pathlib import Path

import torch


def resident_mib() -> int:
    """Memory that is this process's own: pages of files that are mapped do not count."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return sum(int(re.search(rf"{name}:\s+(\d+)", text)[1]) for name in ("RssAnon",)) >> 10


def main(arguments: list[str]) -> int:
    from transformers import AutoModelForCausalLM

    from trainer.inference import pipeline

    ranks, device = int(os.environ.get("WORLD_SIZE", 1)), torch.device("cpu")
    pipeline.init_process_group(device, ranks)
    before = resident_mib()
    folder = Path(arguments[0])
    model = pipeline.load(AutoModelForCausalLM, folder, torch.float32, device, ranks)
    with torch.inference_mode():
        model(input_ids=torch.arange(8)[None])
    print(f"grown by {resident_mib() - before} MiB", flush=True)
    return 0
