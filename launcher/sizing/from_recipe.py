"""The training step that a resolved recipe describes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from launcher import paths, yamlfile
from launcher.errors import RecipeFault, nearest
from launcher.recipes.recipe import method_of
from launcher.sizing.step_config import StepConfig
from runspec import shape as shapes
from runspec.files import read_json
from runspec.keys.sft import recomputed
from runspec.layout import Layout, LayoutError, model_faults
from runspec.shape import ATTENTION, MLP, Shape


@cache
def _known_shapes() -> dict[str, dict[str, Any]]:
    return yamlfile.load(paths.REPO_ROOT / "configs" / "models.yaml")


def shape_of(model: Mapping[str, Any], folder: Path | None) -> Shape:
    """Return the shape of the model that a `model` block builds; RecipeFault if it is not known.

    A named builder has its sizes in code, copied to configs/models.yaml; a component builder takes
    them as arguments; of any other the config.json in the model's folder says them.
    """
    builder = str(model.get("_component_") or "")
    module, _, name = builder.rpartition(".")
    plain = f"{module}.{re.sub('^q?lora_', '', name)}"
    family = module.rpartition(".")[2]
    if plain in _known_shapes():
        return Shape(
            **_known_shapes()[plain], whole_rotary=shapes.family_traits(family)["whole_rotary"]
        )
    if shape := shapes.of_builder_arguments(model, family):
        return shape
    file = folder / "config.json" if folder else None
    if file is None or not file.is_file():
        raise RecipeFault(
            f"model._component_ {builder!r}{nearest(plain, _known_shapes())}: its sizes are not "
            "known here: download the model to checkpointer.checkpoint_dir, whose config.json says "
            "them"
        )
    try:
        return shapes.of_config_json(read_json(file) or {})
    except (OSError, ValueError) as error:
        raise RecipeFault(f"{file}: {error}") from error


def step_of(config: Mapping[str, Any], nodes: int, gpus_per_node: int) -> StepConfig:
    """Return the step of a resolved recipe; RecipeFault names all that is wrong."""
    model = _block(config, "model")
    folder = _block(config, "checkpointer").get("checkpoint_dir")
    shape = shape_of(model, Path(folder) if folder else None)
    layout, faults = Layout(), []
    try:
        layout = Layout.of(config, nodes * gpus_per_node, gpus_per_node)
        faults = model_faults(layout.tensor_parallel, shape.split_sizes)
    except LayoutError as error:
        faults = error.faults
    length = _block(config, "tokenizer").get("max_seq_len") or 0
    if not length:
        faults.append(
            "tokenizer.max_seq_len is not set, and the longest sample decides the memory: set "
            "tokenizer.max_seq_len=4096, or what your data need"
        )
    if faults:
        raise RecipeFault(faults)
    offload = bool(config.get("fsdp_cpu_offload") or _block(config, "fsdp").get("cpu_offload"))
    return StepConfig(
        shape=shape,
        method=method_of(model),
        layout=layout,
        gpus_per_node=gpus_per_node,
        builder=str(model.get("_component_") or ""),
        batch=int(config.get("batch_size") or 1),
        length=int(length),
        accumulation=int(config.get("gradient_accumulation_steps") or 1),
        element_bytes=4 if config.get("dtype") == "fp32" else 2,
        reduce_bytes=2 if config.get("fsdp_reduce_dtype") == "bf16" else 4,
        fp32_master=config.get("master_weights") == "fp32" and config.get("dtype") != "fp32",
        checkpointing=_checkpointing(config),
        # Offloading reduces after every micro-step, as no GPU could hold all gradients.
        sync_each=offload or bool(config.get("sync_each_micro_batch")),
        cpu_offload=offload,
        activation_offload=bool(config.get("enable_activation_offloading")),
        compiled=config.get("compile") is True,
        reshard=config.get("fsdp_reshard_after_forward") is not False,
        apart=tuple(config.get("custom_sharded_layers") or ()),
        **_lora(model),
        **_optimizer(_block(config, "optimizer")),
        **_loss(_block(config, "loss")),
    )


def _block(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def _lora(model: Mapping[str, Any]) -> dict[str, Any]:
    if method_of(model) == "full":
        return {}
    attention = [name for name in model.get("lora_attn_modules") or [] if name in ATTENTION]
    return {
        "lora_rank": int(model.get("lora_rank") or 8),
        "lora_targets": (*attention, *(MLP if model.get("apply_lora_to_mlp") else ())),
        "lora_output": bool(model.get("apply_lora_to_output")),
        "dropout": bool(model.get("lora_dropout")),
    }


def _checkpointing(config: Mapping[str, Any]) -> str:
    layers = recomputed(config)
    return "full" if layers == 1 else str(layers or "none")


def _optimizer(block: Mapping[str, Any]) -> dict[str, Any]:
    name = str(block.get("_component_") or "").rpartition(".")[2].lower()
    kind = "adamw" + next((bits for bits in ("8bit", "4bit") if bits in name), "")
    if name == "sgd":
        kind = "momentum" if block.get("momentum") else "none"
    # As trainer.optimizers: torch's Adam and AdamW are fused unless a form is asked for.
    fused = name in ("adam", "adamw") and "foreach" not in block
    update = "single" if block.get("foreach") is False else "foreach"
    if block.get("fused", fused) or "bit" in name:
        update = "fused"
    return {"optimizer": kind, "update": update}


def _loss(block: Mapping[str, Any]) -> dict[str, Any]:
    name = str(block.get("_component_") or "").rpartition(".")[2]
    if "Linear" in name:
        return {"loss": "linear", "chunks": int(block.get("num_output_chunks") or 0)}
    if "Chunked" in name:
        return {"loss": "chunked", "chunks": int(block.get("num_output_chunks") or 8)}
    return {"loss": "plain"}
