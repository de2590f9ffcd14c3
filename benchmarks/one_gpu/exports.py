"""Reads a run's export by transformers and its adapter by PEFT, and compares their logits.

    python -m benchmarks.one_gpu.exports RUN DEVICE

It needs nothing of the kit, as another interpreter may run it.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTION = "What is the difference between a job and a job step?"
# Of logits: merging an adapter rounds bf16 weights.
LARGEST_DIFFERENCE = 0.15


def main(run: Path, device: str) -> int:
    """Print the largest difference of the logits; exit status 1 if it is too large."""

    def load(folder: str | Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()

    config = yaml.safe_load((run / "train.yaml").read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    ids = tokenizer(QUESTION, return_tensors="pt")["input_ids"].to(device)
    merged, base = load(run / "export"), load(config["checkpointer"]["checkpoint_dir"])
    adapter = next(run.rglob("adapter_config.json")).parent
    with torch.no_grad():
        expected, untrained = merged(ids).logits, base(ids).logits
        found = PeftModel.from_pretrained(base, adapter).to(device).eval()(ids).logits
    gap, change = (float((expected - other).abs().max()) for other in (found, untrained))
    print(f"logits differ by {gap:.3g}; training has changed them by {change:.3g}")
    return int(not gap < LARGEST_DIFFERENCE)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
