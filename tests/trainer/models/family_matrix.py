"""What the trainer's check says of a tiny model of each family, to compare with its description."""

from pathlib import Path
from typing import Any

from tests.trainer.models.transformers_cases import FAMILIES, write
from tests.trainer.models.transformers_runs import EP, LORA, TP, config_of
from trainer import check
from trainer.config import read_yaml
from trainer.methods.sft import SupervisedFineTuning

QLORA = LORA | {"quantize_base": True}
# By the column's name: what a config asks for.
ASKED: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"model": LORA},
    "dora": {"model": LORA | {"adapter": "dora"}},
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


def row(family: str, folder: Path, dataset: Path, tokenizer: Path) -> tuple[Path, dict[str, Any]]:
    """Return a model of the family, and what it takes: by column true, or why it does not."""
    _, settings = FAMILIES[family]
    even = {key: value for key, value in EVEN.items() if key in settings}
    source = write(family, folder / family, tokenizer, **even)
    found: dict[str, Any] = {}
    for name, changes in ASKED.items():
        faults = check.faults(
            read_yaml(config_of(folder / name, source, dataset, **changes)), SupervisedFineTuning
        )
        found[name] = faults[0] if faults else True
    return source, found
