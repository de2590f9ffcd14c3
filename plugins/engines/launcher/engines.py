"""Engines, other programs that train: one row each, with the same fields for all.

A recipe names the engine's own config file (entry: axolotl:config.yaml), or a program of the engine
with `config:` (entry: trl:dpo). The file's content becomes the recipe's `parameters`, so that
overrides, sweeps and checks see it; the run gets it back as train.yaml.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher import yamlfile
from launcher.errors import RecipeFault
from launcher.recipe import entries
from plugins.engines.launcher import start_folder
from plugins.engines.launcher.engine import Engine, count
from runspec.engines import Records

_CONFIG = '"$RUN_DIR/train.yaml"'
# Each rank answers the watchdog by its stacks.
RANK = 'python -P "$COOKBOOK/plugins/engines/rank.py"'
_HF = f'{RANK} "$COOKBOOK/plugins/engines/hf_trainer.py"'
# What transformers' Trainer keeps; hf_trainer.py writes progress.json and the marker.
_HF_RECORDS = Records("transformers", r"checkpoint-(\d+)", "COMPLETE", beats=True)


def _litgpt_iterations(config: Mapping[str, Any]) -> int:
    """Micro-steps of a step: LitGPT's CSV logger counts them."""
    whole, micro = (512, 4) if str(config.get("entry")).endswith(":pretrain") else (16, 1)
    ranks = count(config, "resources.nodes", 1) * count(config, "resources.gpus_per_node", 1)
    per_rank = count(config, "parameters.train.global_batch_size", whole) // ranks
    return max(1, per_rank // count(config, "parameters.train.micro_batch_size", micro))


def _litgpt_reads(content: Mapping[str, Any]) -> dict[str, str]:
    """Another name is downloaded."""
    keys = ("checkpoint_dir", "initial_checkpoint_dir", "tokenizer_dir")
    given = {key: str(content.get(key)) for key in keys}
    return {key: name for key, name in given.items() if name.startswith("checkpoints/")}


def _llamafactory_reads(content: Mapping[str, Any]) -> dict[str, str]:
    """The file that says what the names of datasets mean."""
    folder = content.get("dataset_dir", "data")
    remote = not isinstance(folder, str) or folder == "ONLINE" or folder.startswith("REMOTE:")
    return (
        {} if remote or not content.get("dataset") else {"dataset": f"{folder}/dataset_info.json"}
    )


def _automodel_layout(config: Mapping[str, Any], ranks: int) -> str | None:
    """By the rules of its StepScheduler, which it asks after every rank has loaded the model."""
    place = "parameters.distributed"
    split = math.prod(
        count(config, f"{place}.{key}", 1) for key in ("tp_size", "pp_size", "cp_size")
    )
    if ranks % split:
        return f"{ranks} ranks are no multiple of tp_size * pp_size * cp_size = {split}"
    place = "parameters.step_scheduler"
    whole = count(config, f"{place}.global_batch_size", 0)
    each = count(config, f"{place}.local_batch_size", 1)
    together = each * ranks // split
    if whole % together == 0:
        return None
    return (
        f"step_scheduler.global_batch_size={whole} is no multiple of local_batch_size={each} "
        f"times {ranks // split} data-parallel ranks, {together}"
    )


ENGINES: dict[str, Engine] = {
    # Its files hold what TRL's do, and more.
    "llamafactory:": Engine(
        command=f"{_HF} llamafactory.launcher {_CONFIG}",
        records=replace(_HF_RECORDS, name="LLaMA-Factory"),
        own={"output_dir": "RUN_DIR/checkpoints"},
        dependencies=("llamafactory==0.9.5",),
        pins=False,
        known_by=(
            frozenset({"model_name_or_path"}),
            frozenset({"finetuning_type", "stage", "dataset_dir"}),
        ),
        reads=_llamafactory_reads,
        schema="llamafactory",
    ),
    "trl:": Engine(
        command=f"{_HF} {{program}} --config {_CONFIG}",
        records=replace(_HF_RECORDS, name="TRL"),
        programs={
            name: f"trl.scripts.{name}"
            for name in ("sft", "dpo", "kto", "reward", "grpo", "rloo", "distillation")
        },
        own={"output_dir": "RUN_DIR/checkpoints"},
        dependencies=("trl==1.16.0",),
        known_by=(
            frozenset({"model_name_or_path"}),
            frozenset({"dataset_name", "per_device_train_batch_size", "datasets"}),
        ),
        schema="trl",
    ),
    "automodel:": Engine(
        command=f"{RANK} nemo_automodel.cli.app {_CONFIG}",
        records=Records(
            "NeMo Automodel",
            r"epoch_\d+_step_(\d+)",
            incomplete=".incomplete",
            metrics="checkpoints/training.jsonl",
            names={"tps_per_gpu": "tokens_per_second_per_gpu", "timestamp": "", "mem": ""},
            first_step=0,
            stop="TERM",
        ),
        own={"checkpoint.enabled": True, "checkpoint.checkpoint_dir": "RUN_DIR/checkpoints"},
        total="step_scheduler.max_steps",
        layout_fault=_automodel_layout,
        dependencies=("nemo-automodel==0.7.0",),
        pins=False,
        schema="nemo_automodel",
        needs_gpu=True,
        known_by=(
            frozenset({"model", "step_scheduler"}),
            frozenset({"distributed", "dataset", "dist_env"}),
        ),
    ),
    "litgpt:": Engine(
        command=f"{RANK} litgpt {{program}} --config {_CONFIG}",
        records=Records(
            "LitGPT",
            r"step-(\d+)",
            # The last file that it writes.
            "prompt_style.yaml",
            metrics="checkpoints/logs/csv/version_*/metrics.csv",
            form="csv",
            names={"learning_rate": "lr", "total_tokens": "tokens", "iter_time": ""},
            stop="TERM",
        ),
        programs={
            name: name
            for name in ("finetune_full", "finetune_lora", "finetune_adapter", "pretrain")
        },
        own={
            "out_dir": "RUN_DIR/checkpoints",
            "logger_name": "csv",
            "resume": "auto",
            "devices": "GPUS_PER_NODE",
            "num_nodes": "NODES",
        },
        lacks={"finetune_lora": ("resume",), "finetune_adapter": ("resume",)},
        total="train.max_steps",
        iterations=_litgpt_iterations,
        dependencies=("litgpt==0.5.13", "jsonargparse", "pandas", "requests"),
        pins=False,
        known_by=(
            frozenset({"train"}),
            frozenset({"checkpoint_dir", "initial_checkpoint_dir", "model_name"}),
        ),
        reads=_litgpt_reads,
        schema="litgpt",
    ),
    "axolotl:": Engine(
        command=f"{_HF} axolotl.cli.train {_CONFIG}",
        records=replace(_HF_RECORDS, name="axolotl"),
        own={"output_dir": "RUN_DIR/checkpoints"},
        dependencies=("axolotl==0.19.0",),
        pins=False,
        known_by=(
            frozenset({"base_model"}),
            frozenset({"datasets", "adapter", "sequence_len", "micro_batch_size", "rl"}),
        ),
        schema="axolotl",
    ),
    "torchtitan:": Engine(
        command=f"{RANK} torchtitan.train {{program}}",
        records=Records(
            "torchtitan",
            r"step-(\d+)",
            ".metadata",
            metrics="logs/[0-9]*/rank_0.log",
            form="log",
            line=r"step: +(?P<step>\d+) +loss: +(?P<loss>[\d.naif]+)"
            r"(?: +grad_norm: +(?P<grad_norm>[\d.naif]+))?"
            r"(?: +memory: +\S+)?(?: +tps: +(?P<tps>[\d,]+))?",
            names={"tps": "tokens_per_second_per_gpu"},
            stop="TERM",
        ),
        own={
            "dump_folder": "RUN_DIR",
            "checkpoint.enable": True,
            "checkpoint.folder": "checkpoints",
            "metrics.save_tb_folder": "tensorboard",
        },
        total="training.steps",
        overrides="options",
        # It names no torch, and needs older datasets than the kit's.
        dependencies=("torchtitan==0.3.0", "torch"),
        pins=False,
        schema="torchtitan",
        needs_gpu=True,
    ),
    # A script of the user's own with a DeepSpeed config, which is JSON, as DeepSpeed's launcher
    # gives it.
    "deepspeed:": Engine(
        command=f'{RANK} {{program}} --deepspeed_config "$COOKBOOK_PARAMETERS"',
        overrides="parameters",
        records=Records("DeepSpeed", r"global_step(\d+)", "*model_states.pt"),
        dependencies=("deepspeed==0.19.8",),
        schema="deepspeed",
    ),
}


def read(config: dict[str, Any], path: Path) -> None:
    """Put the engine's config file under the recipe's parameters, once.

    Args:
        config: the content of a recipe that starts an engine; it is changed.
        path: the recipe's file.

    Raises:
        RecipeFault: the file is missing, no mapping, or another engine's.
    """
    prefix, _, target = str(config["entry"]).partition(":")
    prefix, engine = f"{prefix}:", ENGINES[f"{prefix}:"]
    given = config.get("config")
    is_file = target.endswith((".yaml", ".yml"))
    name = str(given) if given else target if is_file else ""
    if not target or not name or config.get("config_read_from"):
        return
    file = (path.parent / Path(name).expanduser()).resolve()
    key = "config" if given else "entry"
    if not file.is_file():
        message = f"{key}: there is no config file {file}"
        raise RecipeFault(f"{message}: its path counts from {path.parent}")
    content = yamlfile.load(file)
    other = entries.recognised(content)
    if other and other != prefix and not engine.may_read(content):
        message = f"{file} is a config of {entries.find(f'{other}FILE').title}"
        raise RecipeFault(f"{message}, not of {engine.records.name}: use entry: {other}{name}")
    own = config.get("parameters")
    config["parameters"] = _merged(content, own if isinstance(own, dict) else {})
    config["config_read_from"] = str(file)
    if is_file and engine.programs:
        known = [f"entry={prefix}{name}" for name in engine.programs]
        beside = "" if given else f", with config: {name} in the recipe"
        raise RecipeFault(
            f"{file} is a config of {engine.records.name} and does not say of which program: add "
            f"{' or '.join(known)}{beside}"
        )
    config.setdefault("work_dir", str(start_folder.find(config["parameters"], engine, file)))


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**below, **above}
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            merged[key] = _merged(below[key], value)
    return merged
