"""The keys of LLaMA-Factory's configs."""

import json
from pathlib import Path
from typing import Any

from launcher.recipes.peers import data
from launcher.recipes.peers.table import (
    Answer,
    Draft,
    Peer,
    Refused,
    Row,
    Unused,
    off,
    only_for,
    rows,
    switch,
)
from launcher.recipes.peers.trainer import (
    ARGUMENTS,
    DEFAULTS,
    FLASH,
    KERNELS,
    LOADING,
    LOGGING,
    TOKENIZER,
    four_bits,
    hub_model,
    modules,
    start_from_adapter,
    tokens,
)

_STAGES = {"sft": "sft", "pt": "pretrain", "dpo": "dpo", "kto": "kto", "rm": "reward"}
_LOSSES = {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
_WAY = "start LLaMA-Factory itself with this file"


def _begin(draft: Draft) -> None:
    draft.entry = _STAGES.get(str(draft.get("stage")), "sft")
    draft.method = "lora" if draft.get("finetuning_type") == "lora" else "full"


def _stage(draft: Draft, value: Any) -> Answer:
    if value not in _STAGES:
        return Refused(f"this kit's trainer has no {value}: {_WAY}")
    draft.put("entry", draft.entry)
    return None


def _kind(draft: Draft, value: Any) -> Answer:
    if value not in ("lora", "full"):
        return Refused(f"{value} is not here: use lora or full (freeze: names frozen parameters)")
    return "extends hub_lora" if value == "lora" else "extends hub_full"


def _datasets(draft: Draft, value: Any) -> Answer:
    """Rows of dataset_info.json: files of one form become one list, anything else is refused."""
    names = value if isinstance(value, list) else [name.strip() for name in str(value).split(",")]
    folder = Path(str(draft.get("dataset_dir")))
    beside = Path(draft.folder) / folder
    folder = beside if beside.is_dir() else folder
    try:
        known = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Refused(
            f"{folder / 'dataset_info.json'}, which says what {value} is, cannot be read: set "
            "dataset_dir, or give --data FILE"
        )
    if unknown := [name for name in names if name not in known]:
        return Refused(f"{unknown[0]} is not in {folder / 'dataset_info.json'}: give --data FILE")
    blocks = [_block(draft, folder, known[name]) for name in names]
    rest = [{key: each for key, each in block.items() if key != "data_files"} for block in blocks]
    if any(each != rest[0] for each in rest):
        return Refused(data.ONE_DATASET)
    if len(blocks) > 1:
        if "data_files" not in blocks[0]:
            return Refused(data.ONE_DATASET)
        blocks[0]["data_files"] = [block["data_files"] for block in blocks]
    if isinstance(limit := draft.get("max_samples"), int):
        blocks[0]["split"] += f"[:{limit}]" if len(blocks) == 1 else ""
    data.put(draft, blocks[0])
    return None


def _limit(draft: Draft, value: Any) -> Answer:
    if "," in str(draft.get("dataset")):
        return Refused(
            "several files cannot be cut at a number of samples each: --leave-out max_samples "
            "trains on all of them"
        )
    return "the first samples, in dataset.split"


def _block(draft: Draft, folder: Path, row: dict[str, Any]) -> dict[str, Any]:
    """A row of dataset_info.json; alpaca's prompt is the instruction, and the input below it."""
    name = str(folder / row["file_name"]) if "file_name" in row else str(row.get("hf_hub_url"))
    where = data.origin(draft, name, None, row.get("subset"), row.get("split"))
    columns, form = row.get("columns") or {}, data.form(draft)
    chat = row.get("formatting") == "sharegpt"
    prompt = columns.get("messages" if chat else "prompt")
    if form.preferences:
        own = {name: columns.get(name) for name in ("chosen", "rejected")}
        own |= {"prompt": prompt or ("conversations" if chat else "instruction")}
        if form.labelled:
            own = {"prompt": own["prompt"], "label": columns.get("kto_tag", "kto_tag")}
            own |= {"completion": columns.get("response", "output")}
        renamed = {key: each for key, each in own.items() if each and each != key}
        return {**where, "column_map": renamed, "drop_invalid": True}
    if form.plain:
        return {"_component_": data.TEXTS, **where, "column": prompt or "text"}
    trained = {"train_on_input": bool(draft.get("train_on_prompt"))}
    if chat:
        tags = row.get("tags") or {}
        style = "openai" if tags.get("role_tag") == "role" else "sharegpt"
        own = {"conversation_column": prompt or "conversations", "conversation_style": style}
        last = {"train_on": "last"} if draft.get("mask_history") and style == "openai" else {}
        return {"_component_": data.CHAT, **where, **own, **last, **trained}
    query, answer = columns.get("query", "input"), columns.get("response", "output")
    asked = "{" + (prompt or "instruction") + "}" + (f"\n{{{query}}}" if query else "")
    text = {"prompt": asked, "answer": "{" + answer + "}"}
    return {"_component_": data.INSTRUCT, **where, **text, **trained}


def _loss(draft: Draft, value: Any) -> Answer:
    if not data.form(draft).names_loss:
        return Unused("it belongs to another stage")
    if value not in _LOSSES:
        return Refused(f"the loss {value} is not here: use one of {', '.join(_LOSSES)}")
    draft.put("loss", _LOSSES[value])
    return None


def _precision(draft: Draft, value: Any) -> Answer:
    draft.put("dtype", "bf16" if value or draft.get("pure_bf16") else "fp32")
    if not value:
        return None
    draft.put("master_weights", None if draft.get("pure_bf16") else "fp32")
    return "weights that are trained are fp32, as there"


def _recomputed(draft: Draft, value: Any) -> Answer:
    draft.put("activation_checkpointing", "none" if value else "full")
    return None


def _end(draft: Draft) -> None:
    data.pack(draft, draft.get("packing"))
    if draft.method != "full" and draft.values.get("model.lora_alpha") is None:
        draft.put("model.lora_alpha", 2 * (draft.get("lora_rank") or 8))


TABLE: dict[str, Row] = {
    **ARGUMENTS,
    "model_name_or_path": hub_model,
    "model_revision": lambda draft, value: (
        f"in {draft.get('model_name_or_path')}" if value != "main" else Unused("the newest")
    ),
    "stage": _stage,
    "finetuning_type": _kind,
    "adapter_name_or_path": start_from_adapter,
    "quantization_bit": lambda draft, value: (
        four_bits(draft, True)
        if value == 4
        else off("weights are held in bf16 or 4 bits: quantization_bit: 4")(draft, value)
    ),
    "quantization_method": off("only bnb's NF4 is here: use quantization_method: bnb", "bnb"),
    "quantization_type": off("only NF4 is here", "nf4"),
    "double_quantization": Unused("the scales of NF4 are quantised, too, where it helps"),
    "lora_rank": "model.lora_rank",
    "lora_alpha": "model.lora_alpha",
    "lora_dropout": "model.lora_dropout",
    "lora_target": modules,
    "additional_target": lambda draft, value: draft.put(
        "model.modules_to_save", value if isinstance(value, list) else str(value).split(",")
    ),
    "loraplus_lr_ratio": "model.lora_plus_ratio",
    "use_rslora": switch("model.use_rslora"),
    "use_dora": switch("model.use_dora"),
    "pissa_init": lambda draft, value: (
        draft.put("model.init_lora_weights", "pissa") if value else Unused("it is switched off")
    ),
    "pissa_iter": Unused("the singular values are computed exactly"),
    "pissa_convert": Unused("the export holds a plain adapter, or the merged model"),
    "create_new_adapter": off("merge the first adapter, then train a new one"),
    "dataset": _datasets,
    "dataset_dir": lambda draft, value: "the folder of dataset_info.json",
    "eval_dataset": off("name it as dataset_val in the recipe, or set val_size"),
    "val_size": data.validation,
    "max_samples": _limit,
    "cutoff_len": "tokenizer.max_seq_len",
    "packing": data.packed,
    "neat_packing": Unused("packed samples never see each other here"),
    "train_on_prompt": lambda draft, value: "dataset.train_on_input",
    "mask_history": lambda draft, value: "dataset.train_on: last" if value else Unused("off"),
    "template": Unused(
        "the model folder's own chat template is used (tokenizer.chat_template is another); "
        "compare by cookbook check RECIPE --samples 3"
    ),
    "default_system": off("write it into the data, or dataset.new_system_prompt"),
    "enable_thinking": lambda draft, value: draft.put(
        "tokenizer.chat_template_kwargs", {"enable_thinking": bool(value)}
    ),
    "new_special_tokens": tokens,
    "add_tokens": tokens,
    "add_special_tokens": tokens,
    "pref_beta": only_for("dpo kto", "beta"),
    "pref_ftx": only_for("dpo", "sft_weight"),
    "pref_loss": _loss,
    "dpo_label_smoothing": only_for("dpo", "label_smoothing"),
    "simpo_gamma": only_for("dpo", "simpo_gamma"),
    "kto_chosen_weight": only_for("kto", "desirable_weight"),
    "kto_rejected_weight": only_for("kto", "undesirable_weight"),
    "ref_model": off("the reference is the model itself before training: leave it out"),
    "disable_gradient_checkpointing": _recomputed,
    "gradient_checkpointing": Unused("disable_gradient_checkpointing says it"),
    "bf16": _precision,
    "pure_bf16": lambda draft, value: "master_weights" if value else Unused("it is switched off"),
    "fp8": switch("enable_fp8_training"),
    "use_muon": off("set optimizer._component_: torch.optim.Muon in the recipe"),
    "rope_scaling": off("set it in the model's config.json"),
    "moe_aux_loss_coef": "router_aux_loss_coef",
    "train_from_scratch": lambda draft, value: (
        draft.put("from_scratch", True) if value else Unused("it is switched off")
    ),
    "use_swanlab": off("tracking: mlflow or wandb"),
    "streaming": off("set max_steps and entry: pretrain with dataset.sources, or leave it out"),
    "mix_strategy": off(data.ONE_DATASET, "concat"),
    "disable_shuffling": lambda draft, value: draft.put("shuffle", not value),
    "freeze_trainable_layers": off("name the frozen parameters: freeze"),
    "early_stopping_steps": off("export_checkpoint: best has the lowest validation loss"),
    "use_unsloth": off(f"the kit has kernels of its own: leave it out, or {_WAY}"),
    **rows(
        off(f"its method is not in this kit: {_WAY}"),
        "use_galore galore_target galore_rank galore_update_interval galore_scale galore_proj_type "
        "galore_layerwise use_apollo apollo_target apollo_rank apollo_update_interval apollo_scale "
        "apollo_layerwise apollo_proj apollo_proj_type apollo_scale_type apollo_scale_front "
        "use_badam badam_mode badam_switch_mode badam_switch_interval badam_update_ratio "
        "badam_start_block badam_mask_mode badam_verbose use_adam_mini use_llama_pro "
        "mixture_of_depths use_dft_loss use_asft_loss asft_alpha use_eaft_loss eaft_alpha use_mca "
        "use_megatron_bridge use_kt oft_rank oft_block_size oft_target module_dropout shift_attn "
        "pref_bco_weight ld_alpha loraplus_lr_embedding reward_model ppo_epochs "
        "freeze_extra_modules "
        "freeze_trainable_modules upcast_layernorm upcast_lmhead_output tokenized_path",
    ),
    **rows(FLASH, "flash_attn block_diag_attn"),
    **rows(KERNELS, "enable_liger_kernel use_v1_kernels use_unsloth_gc use_reentrant_gc"),
    **rows(TOKENIZER, "use_fast_tokenizer split_special_tokens resize_vocab tool_format"),
    **rows(
        LOADING,
        "overwrite_cache preprocessing_num_workers preprocessing_batch_size buffer_size cache_dir "
        "data_shared_file_system media_dir low_cpu_mem_usage hf_hub_token ms_hub_token "
        "om_hub_token ignore_pad_token_for_loss print_param_status quantization_device_map "
        "offload_folder use_kv_cache infer_dtype infer_backend",
    ),
    **rows(
        LOGGING,
        "compute_accuracy swanlab_project swanlab_run_name swanlab_mode eval_num_beams "
        "include_effective_tokens_per_second eval_on_each_dataset",
    ),
    **rows(
        Unused("they are about images, video or sound"),
        "image_max_pixels image_min_pixels video_max_pixels video_min_pixels video_fps "
        "video_maxlen "
        "freeze_vision_tower freeze_multi_modal_projector freeze_language_model",
    ),
    **rows(
        Unused("the cluster is Slurm"),
        "ray_run_name ray_storage_path ray_num_workers resources_per_worker placement_strategy "
        "ray_init_kwargs",
    ),
}

LLAMAFACTORY = Peer(
    name="LLaMA-Factory",
    prefix="llamafactory:",
    table=TABLE,
    begin=_begin,
    end=_end,
    data=frozenset({"dataset", "dataset_dir", "max_samples", "eval_dataset", "mix_strategy"}),
    model=frozenset({"model_name_or_path", "model_revision"}),
    defaults={
        **DEFAULTS,
        "cutoff_len": 2048,
        "dataset_dir": "data",
        "finetuning_type": "lora",
        "disable_gradient_checkpointing": False,
        "lora_rank": 8,
        "lora_dropout": 0.0,
        "pref_beta": 0.1,
        "pref_loss": "sigmoid",
        "bf16": False,
    },
)
