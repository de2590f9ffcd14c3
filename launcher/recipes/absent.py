"""What users of other tools ask for and this version does not have, and what to use instead."""

from collections.abc import Mapping
from typing import Any, NamedTuple

_SCRIPT = "a script of your own (docs/scripts.md)"
_TRL = f"TRL in {_SCRIPT}"


# Entries by the names that other tools give to their methods.
ENTRIES = {
    "ppo": f"reinforcement learning: use {_TRL}",
    "grpo": f"reinforcement learning: use {_TRL}",
    "orpo": "entry of its own for ORPO: use entry: dpo with loss: orpo",
    "simpo": "entry of its own for SimPO: use entry: dpo with loss: simpo",
    "ipo": "entry of its own for IPO: use entry: dpo with loss: ipo",
    "kd": "entry of that name: use entry: distill",
    "gkd": "generation by the student while it is distilled: use entry: distill with beta",
    "command": f"commands that torchrun does not start: use {_SCRIPT}",
}
_CONTAINERS = (
    "jobs run in the kit's virtual environment, not in containers: load modules with job_setup in "
    "configs/clusters/NAME.yaml, and run a container's own training by sbatch"
)
_PACKAGES = (
    "recipes install no packages: install them into the virtual environment with pip, or with "
    "bash setup.sh --with NAME"
)
# Top-level keys of a recipe.
KEYS = {
    "container": _CONTAINERS,
    "image": _CONTAINERS,
    "docker": _CONTAINERS,
    "apptainer": _CONTAINERS,
    "environment": _PACKAGES,
    "dependencies": _PACKAGES,
    "pip": _PACKAGES,
    "conda": _PACKAGES,
    "deepspeed": f"the trainer uses FSDP, not DeepSpeed: leave it out, or use {_SCRIPT}",
    "context_parallel_dim": "sequences are not split over GPUs: use tensor_parallel_dim",
    "pipeline_parallel_dim": "layers are not split over GPUs: use tensor_parallel_dim and FSDP",
}


class _Tool(NamedTuple):
    """Another tool, the keys by which its files are known, and those that name model and data."""

    name: str
    all_of: frozenset[str]
    one_of: frozenset[str]
    model: str
    data: str


_TOOLS = (
    _Tool(
        "axolotl",
        frozenset({"base_model"}),
        frozenset({"datasets", "adapter", "sequence_len", "micro_batch_size", "rl"}),
        "base_model",
        "datasets.0.path",
    ),
    _Tool(
        "LLaMA-Factory",
        frozenset({"model_name_or_path"}),
        frozenset({"finetuning_type", "stage", "dataset_dir"}),
        "model_name_or_path",
        "dataset",
    ),
    _Tool(
        "TRL",
        frozenset({"model_name_or_path"}),
        frozenset({"dataset_name", "per_device_train_batch_size", "datasets"}),
        "model_name_or_path",
        "dataset_name",
    ),
    _Tool(
        "LitGPT",
        frozenset({"checkpoint_dir", "train"}),
        frozenset({"data", "precision", "eval"}),
        "checkpoint_dir",
        "data.init_args.json_path",
    ),
    _Tool(
        "NeMo Automodel",
        frozenset({"model", "step_scheduler"}),
        frozenset({"distributed", "dataset", "dist_env"}),
        "model.pretrained_model_name_or_path",
        "dataset.path_or_dataset",
    ),
    _Tool(
        "Databricks' air",
        frozenset({"command", "compute"}),
        frozenset({"experiment_name", "environment", "code_source"}),
        "",
        "",
    ),
)


def other_tool(config: Mapping[str, Any]) -> str | None:
    """Return what to do with another tool's file, None if it is none."""
    for tool in _TOOLS:
        if tool.all_of <= config.keys() and tool.one_of & config.keys() and "entry" not in config:
            model = _text(config, tool.model) or "MODEL"
            data = _text(config, tool.data) or "DATA"
            start = f"cookbook start {data if data.startswith(('/', '.')) else 'FILE'} {model}"
            return (
                f"is a config of {tool.name}, which the kit does not read: to train the same with "
                f"the kit's trainer: {start}; to keep {tool.name}, start it from {_SCRIPT}"
            )
    return None


def _text(config: Any, path: str) -> str | None:
    for part in path.split("."):
        if isinstance(config, list) and part.isdigit() and int(part) < len(config):
            config = config[int(part)]
        else:
            config = config.get(part) if isinstance(config, Mapping) else None
    return config if isinstance(config, str) else None
