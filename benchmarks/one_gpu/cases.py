"""What `correct` trains: a row for each kernel and mechanism, and what its loss curve must equal.

The models and data are those of benchmarks.one_gpu.models; settings are keys of train.yaml, dotted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.one_gpu.parts import CPU

BOTH, HALF = ("fp32", "bf16"), ("bf16",)
# Largest relative differences of a loss: over the whole curve, and over its first steps, before
# the optimizer has made small differences large.
LIMITS = {"fp32": (2e-3, 2e-5), "bf16": (6e-2, 4e-3)}
FIRST_STEPS = 3

LORA: dict[str, Any] = {"model.lora_rank": 8, "model.lora_alpha": 16}
QLORA = LORA | {"model.quantize_base": True}
PREFIX = {
    "model.adapter": "prefix",
    "model.num_virtual_tokens": 8,
    "save_adapter_weights_only": True,
}
COMPILED = {"compile": True}
FP8 = {"enable_fp8_training": True}
CHUNKED = {"loss.num_output_chunks": 8}
# It has no betas, and takes matrices only.
MUON = {"_component_": "torch.optim.Muon", "lr": 1e-3, "weight_decay": 0.01}
RECOMPUTED, BY_OPERATION = ({"activation_checkpointing": mode} for mode in ("full", "op"))
OFFLOADED = RECOMPUTED | {"enable_activation_offloading": True}


@dataclass(frozen=True)
class Case:
    """One run; `against` is the CPU in the same dtype, or a case of the same device."""

    name: str
    shows: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = HALF
    against: str = CPU
    model: str = "llama"
    method: str = "sft"


CASES = (
    Case("full", "attention over padded rows", {"dataset.packed": False}, BOTH),
    Case("packed", "varlen FlashAttention 2 (bf16), FlexAttention (fp32)", {}, BOTH),
    Case("lora", "LoRA", LORA, BOTH),
    Case("qlora", "NF4 and LoRA", QLORA, BOTH),
    Case("dora", "DoRA", LORA | {"model.adapter": "dora"}, BOTH),
    Case("prefix", "keys and values before each document", PREFIX, BOTH),
    Case("window", "attention with a window", {}, BOTH, model="window"),
    Case("softcap", "FlexAttention with a soft cap", {}, BOTH, model="gemma2"),
    Case("sinks", "FlexAttention with sinks, experts with biases", {}, BOTH, model="sinks"),
    Case("moe", "grouped products of experts", {}, BOTH, model="moe"),
    Case("delta", "linear attention", {}, model="delta"),
    Case(
        "moe_qlora",
        "experts in NF4 with LoRA",
        QLORA | {"model.lora_modules": ["q_proj", "v_proj", "experts"]},
        model="moe",
    ),
    Case("fp8", "fp8 products, a scale per tensor", FP8),
    Case("fp8_rowwise", "fp8 products, a scale per row", FP8 | {"fp8_recipe_name": "rowwise"}),
    Case("dpo", "DPO with LoRA", LORA, BOTH, method="dpo"),
    Case("kto", "KTO with LoRA", LORA, method="kto"),
    Case("grpo", "GRPO: answers, rewards, policy loss", {}, ("fp32",), model="sums", method="grpo"),
    Case("master_weights", "weights in fp32 beside bf16", {"master_weights": "fp32"}),
    Case("cpu_offload", "weights in host memory", {"fsdp_cpu_offload": True}),
    Case("adamw8bit", "8-bit AdamW", {"optimizer._component_": "torchao.optim.AdamW8bit"}),
    Case("muon", "Muon with LoRA", LORA | {"optimizer": MUON}),
    Case("compiled", "torch.compile", COMPILED, BOTH, "packed"),
    Case("lora_compiled", "the same with LoRA", LORA | COMPILED, against="lora"),
    Case("qlora_compiled", "the same with QLoRA", QLORA | COMPILED, against="qlora"),
    Case("moe_compiled", "the same with experts", COMPILED, against="moe", model="moe"),
    Case("softcap_compiled", "with a soft cap", COMPILED, against="softcap", model="gemma2"),
    Case("fp8_compiled", "the same with fp8", FP8 | COMPILED, against="fp8"),
    Case("recompute", "recomputed layers", RECOMPUTED, BOTH, "packed"),
    Case("recompute_2", "every second layer", {"activation_checkpointing": 2}, HALF, "packed"),
    Case("recompute_op", "recomputed by operation", BY_OPERATION, HALF, "packed"),
    Case("recompute_op_compiled", "compiled", BY_OPERATION | COMPILED, HALF, "compiled"),
    Case("recompute_op_flex", "with a soft cap", BY_OPERATION, HALF, "softcap", "gemma2"),
    Case("offloaded", "activations in host memory", OFFLOADED, HALF, "packed"),
    Case("chunked", "a loss in eight chunks", CHUNKED, HALF, "packed"),
)

PREFERENCES = "trainer.data.preferences."
# By method: the name that trainer.train takes, component and file of the data, and settings.
METHODS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "sft": ("sft", "torchtune.datasets.text_completion_dataset", "corpus.jsonl", {}),
    "dpo": ("dpo", f"{PREFERENCES}PreferenceDataset", "pairs.jsonl", {"loss": "dpo"}),
    "kto": ("kto", f"{PREFERENCES}UnpairedPreferenceDataset", "pairs.jsonl", {"loss": None}),
    "grpo": (
        "plugins.rl.recipe_keys:GrpoConfig",
        "trainer.data.prompts.prompt_dataset",
        "sums/model/prompts.jsonl",
        {
            "loss": "dapo",
            "epsilon_high": 0.28,
            "max_new_tokens": 4,
            "updates_per_rollout": 2,
            "batch_size": 64,
            "tokenizer.max_seq_len": 16,
            "rewards": {"correct": {"function": "exact_match", "column": "answer"}},
        },
    ),
}


def settings(case: Case, models: Path, steps: int) -> dict[str, Any]:
    """All settings of a case's run beside those of a job."""
    _, component, file, own = METHODS[case.method]
    found: dict[str, Any] = {
        "seed": 3,
        "shuffle": True,
        "num_workers": 0,
        "epochs": 50,
        "max_steps": min(steps, 10) if case.method == "grpo" else steps,
        "compile": False,
        "data_cache_dir": str(models / "tokens"),
        "dataset._component_": component,
        "dataset.data_files": str(models / file),
        "dataset.packed": case.method != "grpo",
        "optimizer.weight_decay": 0.01,
    }
    return found | own | case.settings
