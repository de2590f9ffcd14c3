"""Rules of a config that need several keys, and notes about keys that do less than they seem to."""

from collections.abc import Iterator
from typing import Any

from runspec.keys.key import unused
from runspec.keys.sft import SFT, recomputed
from trainer.components import prefix_faults


def faults(values: dict[str, Any]) -> Iterator[str]:
    """Everything that is wrong between keys.

    Args:
        values: a value of its kind for each key, the default if it is not given; None for a
            required one that is missing or wrong.
    """
    for key in (
        "model",
        "tokenizer",
        "dataset",
        "dataset_val",
        "optimizer",
        "lr_scheduler",
        "loss",
    ):
        if "_component_" in (values[key] or {}):
            yield from prefix_faults(key, values[key])
    yield from _data_faults(values)
    yield from _recomputation_faults(values)
    if values["enable_fp8_training"]:
        yield from _fp8_faults(values)
    if values["generate"] and values["save_adapter_weights_only"]:
        yield "generate: needs the merged model; set save_adapter_weights_only=False"


def _data_faults(values: dict[str, Any]) -> Iterator[str]:
    if not values["dataset_val"]:
        if values["run_val_every_n_steps"]:
            yield "run_val_every_n_steps: needs dataset_val, such as dataset_val.split=train[95%:]"
        if values["export_checkpoint"] == "best":
            yield "export_checkpoint: best needs dataset_val, such as dataset_val.split=..."
    tokenizer = values["tokenizer"]
    for key in ("dataset", "dataset_val"):
        is_packed = tokenizer and (values[key] or {}).get("packed")
        if is_packed and not tokenizer.get("max_seq_len"):
            yield f"{key}.packed: set tokenizer.max_seq_len, the length of a packed row"


def _recomputation_faults(values: dict[str, Any]) -> Iterator[str]:
    mode, option = values["ac_mode"], values["ac_option"]
    layers = recomputed(values)
    if mode == "selective" and layers is None:
        yield (
            "ac_option: must be op, or n to recompute every n-th layer, if ac_mode is selective; "
            f"got {option!r}"
        )
    if mode == "none" and values["enable_activation_checkpointing"]:
        yield "ac_mode: is none and enable_activation_checkpointing is True; remove one"
    if values["enable_activation_offloading"] and not isinstance(layers, int):
        yield (
            "enable_activation_offloading: moves the inputs of recomputed layers; set "
            "activation_checkpointing to full or a number"
        )


def _fp8_faults(values: dict[str, Any]) -> Iterator[str]:
    model = values["model"] or {}
    if values["dtype"] == "fp32":
        yield "enable_fp8_training: needs bf16 weights; set dtype=bf16"
    is_qlora = str(model.get("_component_")).rpartition(".")[2].startswith("qlora_")
    if model.get("quantize_base", is_qlora):
        yield (
            "enable_fp8_training: the base is in 4 bits already; set model.quantize_base=False or "
            "enable_fp8_training=False"
        )


def notes(content: dict[str, Any]) -> Iterator[str]:
    """One line for each key that is not used, or that does less than it seems to."""
    for key in unused(content, SFT):
        yield f"{key.name} is not used: {key.unused}"
    saved, validated = content.get("save_every_n_steps"), content.get("run_val_every_n_steps")
    if saved and validated and saved % validated:
        yield (
            "save_every_n_steps: only a checkpoint at a multiple of run_val_every_n_steps has a "
            "val_loss and can be the best"
        )
    if content.get("enable_fp8_training") and not content.get("compile"):
        yield (
            "enable_fp8_training: its casts take longer than its products save unless they are "
            "compiled; set compile=True"
        )
