"""Prints configs/families.yaml, what each family takes: python -m tests.trainer.family_matrix

Asks the trainer's own check, as `cookbook check` does, about a tiny model of each family. The tests
of tests/trainer/test_transformers.py and test_experts.py prove that what it takes is right.
"""

import tempfile
from pathlib import Path
from typing import Any

import yaml

from launcher import paths
from tests.trainer.transformers_cases import FAMILIES, write
from tests.trainer.transformers_runs import EP, LORA, TP, config_of
from trainer import check, demo
from trainer.config import read_yaml
from trainer.objectives.sft import SupervisedFineTuning

QLORA = LORA | {"quantize_base": True}
# By the column's name: what a config asks for.
ASKED: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"model": LORA},
    "dora": {"model": LORA | {"use_dora": True}},
    "qlora": {"model": QLORA},
    "packing": {"row_length": 64},
    "tensor_parallel": TP,
    "expert_parallel": EP,
    "compile": {"compile": True},
    "fp8": {"enable_fp8_training": True, "dtype": "bf16"},
}
# Sizes that four bits, fp8 and two ranks can divide, as those of published models.
EVEN = {
    "global_head_dim": 32,
    "num_global_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 64,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}


def row(family: str, folder: Path, dataset: Path, tokenizer: Path) -> dict[str, Any]:
    """Return what a family takes: by column true, or why it does not."""
    kind, settings = FAMILIES[family]
    even = {key: value for key, value in EVEN.items() if key in settings}
    source = write(family, folder / family, tokenizer, **even)
    found: dict[str, Any] = {"model_type": kind}
    for name, changes in ASKED.items():
        faults = check.faults(
            read_yaml(config_of(folder / name, source, dataset, **changes)), SupervisedFineTuning
        )
        found[name] = faults[0] if faults else True
    return found


def main() -> None:
    dataset = paths.REPO_ROOT / "configs/datasets/slurm_qa.jsonl"
    print("# What the trainer supports for each family of models; cookbook models shows it.")
    print("# Made by: python -m tests.trainer.family_matrix")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder) / "demo-llama"
        demo.make(tokenizer, dataset, seed=0)
        for family in FAMILIES:
            rows = {family: row(family, Path(folder) / family, dataset, tokenizer)}
            print(yaml.safe_dump(rows, sort_keys=False, width=1000), end="", flush=True)


if __name__ == "__main__":
    main()
