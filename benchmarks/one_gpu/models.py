"""Makes the models and data of benchmarks.one_gpu.cases: python -m benchmarks.one_gpu.models FOLDER

Nothing is downloaded. A model is FOLDER/<name>/model, the data are FOLDER/*.jsonl.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from plugins.rl import demo_sums
from tests.trainer.models.transformers_cases import write
from trainer import demo

QUESTIONS = Path(__file__).parents[2] / "configs/datasets/slurm_qa.jsonl"
PAIRS, SUM_STEPS = 160, 40
# Widths that the kernels of GPUs, grouped products and NF4 take.
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
}
EXPERTS = {"moe_intermediate_size": 128, "num_experts": 8}
LINEAR = {"linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
# By name: a family of the tests' models, and what its config has beside SIZES.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama3", {}),
    "window": ("mistral", {}),
    "gemma2": ("gemma2", {}),
    "moe": ("qwen3-moe", EXPERTS),
    "sinks": ("gpt-oss", {"intermediate_size": 128}),
    "delta": ("qwen3.5", LINEAR),
}


def main(arguments: list[str]) -> int:
    """Write everything; returns exit status 0."""
    folder = Path(arguments[0]).absolute()
    demo_sums.make(folder / "sums/model", steps=SUM_STEPS)
    demo.make(folder / "demo", QUESTIONS)
    for name, (family, own) in FAMILIES.items():
        (folder / name).mkdir()
        write(family, folder / name / "model", folder / "demo", **SIZES | own)
    rows = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    _write(folder / "corpus.jsonl", ({"text": " ".join(row.values())} for row in rows))
    # Rejected is the answer to another question.
    answers = [row["answer"] for row in rows[1 : PAIRS + 1]]
    pairs = (
        {"prompt": row["question"], "chosen": row["answer"], "rejected": other}
        for row, other in zip(rows, answers, strict=False)
    )
    _write(folder / "pairs.jsonl", pairs)
    return 0


def _write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
