"""The keys of NeMo Automodel's configs of fine-tuning."""

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
    names,
    off,
    rows,
    whole,
)
from launcher.recipes.peers.trainer import four_bits, recompute

_WAY = "start Automodel itself with this file"
# As for Automodel's prompts and answers of a model without a chat template: no last token.
_PLAIN = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
_STYLES = {
    "cosine": "get_cosine_with_min_lr_schedule_with_warmup",
    "linear": "get_polynomial_decay_schedule_with_warmup",
    "constant": "get_constant_schedule_with_warmup",
}
_OF_DATASET = names(
    "_target_ dataset_name path_or_dataset path_or_dataset_id split column_mapping "
    "answer_only_loss_mask seq_length padding truncation pad_to_max_length num_samples_limit "
    "limit_dataset_samples name use_hf_chat_template"
)


def _begin(draft: Draft) -> None:
    draft.method = "lora" if draft.get("peft") else "full"
    tensor = draft.get("distributed.tp_size")
    replicas = draft.get("distributed.dp_replicate_size")
    sizes = [size if isinstance(size, int) else 1 for size in (tensor, replicas)]
    draft.needs(sizes[0] * sizes[1])
    draft.put("entry", "sft")


def _recipe(draft: Draft, value: Any) -> Answer:
    if value != "TrainFinetuneRecipeForNextTokenPrediction":
        return Refused(f"this kit has no {value}: {_WAY}")
    return f"entry={draft.entry}"


def _model(draft: Draft, value: Any) -> Answer:
    draft.model = str(value)
    return f"the model {value}"


def _target(*known: str) -> Row:
    def row(_: Draft, value: Any) -> Answer:
        if str(value).rpartition(".")[2] in known or str(value).endswith(known):
            return "as the kit does it"
        return Refused(f"{str(value).rpartition('.')[2]} is not here: {_WAY}")

    return row


def _precision(draft: Draft, value: Any) -> Answer:
    name = str(value).removeprefix("torch.")
    if name not in ("bf16", "bfloat16", "auto", "float32"):
        return Refused("weights are bf16 or fp32 here")
    draft.put("dtype", "fp32" if name == "float32" else "bf16")
    return None


def _batch(draft: Draft, value: Any) -> Answer:
    micro, tensor = draft.get("step_scheduler.local_batch_size"), draft.get("distributed.tp_size")
    ranks = draft.ranks // (tensor if isinstance(tensor, int) else 1)
    return draft.accumulate(int(value), micro, ranks, "data-parallel GPUs")


def _optimizer(draft: Draft, value: Any) -> Answer:
    name = str(value)
    if not name.startswith("torch.optim."):
        return Refused(f"{name} is not here: use torch.optim.AdamW or another of torch.optim")
    draft.put("optimizer._component_", name)
    return None


def _style(draft: Draft, value: Any) -> Answer:
    """A tenth of all steps is the warm-up, from a tenth of the rate."""
    if value not in _STYLES:
        return Refused(f"there is no {value} here: use one of {', '.join(_STYLES)}")
    draft.put("lr_scheduler._component_", f"transformers.{_STYLES[value]}")
    steps, lowest = draft.get("lr_scheduler.lr_warmup_steps"), draft.get("lr_scheduler.min_lr")
    if steps is None:
        draft.put("lr_scheduler.warmup_ratio", 0.1)
    else:
        draft.put("lr_scheduler.num_warmup_steps", steps)
    rate, begin = draft.get("optimizer.lr"), draft.get("lr_scheduler.init_lr")
    factor = 0.1 if begin is None or not rate else begin / rate
    draft.put("lr_scheduler.warmup_start_factor", factor)
    if value != "constant":
        name = "lr_end" if value == "linear" else "min_lr"
        draft.put(f"lr_scheduler.{name}", lowest or 0.01 * (rate or 0))
    return None


def _dataset(draft: Draft, value: Any) -> Answer:
    block = _block(draft, value)
    if isinstance(block, Refused):
        return block
    data.put(draft, block)
    if _has_template(draft):
        return "with the model's chat template"
    draft.put("tokenizer.chat_template", _PLAIN)
    return (
        "prompt and answer as plain text, as for a model without a chat template: no "
        "end-of-sequence token is trained"
    )


def _has_template(draft: Draft) -> bool:
    if draft.get("dataset.use_hf_chat_template"):
        return True
    folder = Path(draft.model).expanduser()
    if folder.is_dir():
        settings = folder / "tokenizer_config.json"
        return (folder / "chat_template.jinja").is_file() or (
            settings.is_file() and "chat_template" in settings.read_text(encoding="utf-8")
        )
    return "instruct" in draft.model.lower() or draft.model.lower().endswith("-it")


def _validation(draft: Draft, value: Any) -> Answer:
    block = _block(draft, value)
    if isinstance(block, Refused):
        return block
    before = draft.values.get("dataset") or {}
    draft.put("dataset_val", {key: each for key, each in block.items() if before.get(key) != each})
    return None


def _block(draft: Draft, value: Any) -> dict[str, Any] | Refused:
    name = str(value.get("_target_")).rpartition(".")[2]
    if unknown := sorted(set(value) - _OF_DATASET):
        return Refused(f"{unknown[0]} of a dataset is not known here: leave it out, or {_WAY}")
    limit = value.get("limit_dataset_samples") or value.get("num_samples_limit")
    split = f"{value.get('split') or 'train'}" + (f"[:{limit}]" if limit else "")
    trained = {"train_on_input": value.get("answer_only_loss_mask") is False}
    if name == "make_squad_dataset":
        where = data.origin(draft, value.get("dataset_name") or "rajpurkar/squad", split=split)
        asked = "Context: {context} Question: {question} Answer: "
        text = _texts(draft, asked, "{answers[text][0]}")
        return {"_component_": data.INSTRUCT, **where, **text, **trained}
    path = str(value.get("path_or_dataset_id") or value.get("path_or_dataset"))
    if name.endswith("ColumnMappedTextInstructionDataset"):
        columns = value.get("column_mapping") or {}
        if "answer" not in columns or not columns.keys() <= {"context", "question", "answer"}:
            return Refused("column_mapping needs answer, and context or question")
        asked = " ".join(f"{{{columns[key]}}}" for key in ("context", "question") if key in columns)
        where = data.origin(draft, path, name=value.get("name"), split=split)
        if where["source"] in ("json", "csv", "parquet", "text"):
            where["split"] = "train" + (f"[:{limit}]" if limit else "")
        text = _texts(draft, f"{asked} ", f"{{{columns['answer']}}}")
        return {"_component_": data.INSTRUCT, **where, **text, **trained}
    return Refused(f"the form of {name} is not known here: give --data FILE")


def _texts(draft: Draft, prompt: str, answer: str) -> dict[str, str]:
    """Without a chat template the space before the answer is trained, as a part of it."""
    if _has_template(draft):
        return {"prompt": prompt, "answer": answer}
    return {"prompt": prompt.rstrip(), "answer": f" {answer}"}


def _order(draft: Draft, value: Any) -> Answer:
    draft.put("shuffle", value.get("shuffle") is not False)
    return "the trainer makes batches by itself"


def _length(draft: Draft, value: Any) -> Answer:
    if not value:
        return Unused("samples are not packed, and a row is as long as its sample")
    draft.put("tokenizer.max_seq_len", value)
    return "dataset.packed=true"


def _pattern(draft: Draft, value: Any) -> Answer:
    listed = value if isinstance(value, list) else [value]
    if any(str(each) in ("*_proj", "*.proj", "*") for each in listed):
        return "all linear layers of the blocks, the default of model.lora_modules"
    names = [str(each).removeprefix("*.").removeprefix("*") for each in listed]
    if any(set(name) & set("*?[") for name in names):
        return Refused("patterns of layers: write their names as model.lora_modules")
    draft.put("model.lora_modules", names)
    return None


def _parallel(path: str) -> Row:
    def row(draft: Draft, value: Any) -> Answer:
        if not isinstance(value, int) or value <= 1:
            return Unused("it is 1, or follows from the number of GPUs")
        draft.put(path, value)
        return None

    return row


def _end(draft: Draft) -> None:
    data.pack(draft, draft.get("packed_sequence.packed_sequence_size"))
    if draft.get("lr_scheduler") is None:
        draft.put("lr_scheduler", None)


_NOT_HERE = f"it is not in this kit's trainer: {_WAY}"
_ITS_OWN = Unused("it is about Automodel's own loading, kernels or tests")

TABLE: dict[str, Row] = {
    "recipe": _recipe,
    "model._target_": _target("NeMoAutoModelForCausalLM.from_pretrained"),
    "model.pretrained_model_name_or_path": _model,
    "model.torch_dtype": _precision,
    **rows(
        _ITS_OWN,
        "model.attn_implementation model.trust_remote_code model.use_liger_kernel "
        "model.use_sdpa_patching model.force_hf model.is_meta_device model.use_cache model.backend "
        "model.text_config ci checkpoint.dequantize_base_checkpoint peft.use_triton peft._target_ "
        "peft.use_memory_efficient_lora nvtx parallelizer autopipeline",
    ),
    "distributed._target_": _target("FSDP2Manager", "DDPManager", "MegatronFSDPManager"),
    "distributed.strategy": _target("fsdp2", "ddp", "megatron_fsdp"),
    "distributed.tp_size": _parallel("tensor_parallel_dim"),
    "distributed.dp_replicate_size": _parallel("data_parallel_replicate_dim"),
    "distributed.ep_size": _parallel("expert_parallel_dim"),
    "distributed.cp_size": off(f"sequences are not split over GPUs: {_WAY}", 1),
    "distributed.pp_size": off(f"layers are not pipelined over GPUs: {_WAY}", 1),
    "distributed.dp_size": Unused("all GPUs that are left are data-parallel"),
    "distributed.sequence_parallel": Unused("tensor parallelism splits the norms, too, by itself"),
    "distributed.activation_checkpointing": recompute,
    **rows(
        Unused("FSDP2 with prefetching is the default; the job starts the ranks"),
        "distributed.defer_fsdp_grad_sync distributed.zero_dp_strategy distributed.mp_policy "
        "dist_env distributed.use_hf_tp_plan",
    ),
    "rng._target_": Unused("the seed is of the data's order, of dropout and of new adapters"),
    "rng.seed": "seed",
    "rng.ranked": Unused("each rank has its own random numbers"),
    "seed": "seed",
    "step_scheduler.global_batch_size": _batch,
    "step_scheduler.local_batch_size": "batch_size",
    "step_scheduler.num_epochs": whole("epochs"),
    "step_scheduler.max_steps": whole("max_steps"),
    "step_scheduler.ckpt_every_steps": "save_every_n_steps",
    "step_scheduler.val_every_steps": "run_val_every_n_steps",
    "step_scheduler.log_remote_every_steps": whole("log_every_n_steps"),
    **rows(_ITS_OWN, "step_scheduler.gc_every_steps step_scheduler.save_checkpoint_every_epoch"),
    "optimizer._target_": _optimizer,
    "optimizer.lr": "optimizer.lr",
    "optimizer.weight_decay": "optimizer.weight_decay",
    "optimizer.betas": "optimizer.betas",
    "optimizer.eps": "optimizer.eps",
    **rows(_ITS_OWN, "optimizer.fused optimizer.foreach optimizer.master_weights"),
    "lr_scheduler.lr_decay_style": _style,
    "lr_scheduler.min_lr": lambda draft, value: "in lr_scheduler",
    "lr_scheduler.lr_warmup_steps": lambda draft, value: "in lr_scheduler",
    "lr_scheduler.init_lr": lambda draft, value: "in lr_scheduler",
    "clip_grad_norm.max_norm": "clip_grad_norm",
    "loss_fn._target_": _target(
        "MaskedCrossEntropy",
        "FusedLinearCrossEntropy",
        "ChunkedCrossEntropy",
        "TEParallelCrossEntropy",
    ),
    "dataset": _dataset,
    "validation_dataset": _validation,
    "dataloader": _order,
    "validation_dataloader": Unused("the trainer makes batches by itself"),
    "packed_sequence.packed_sequence_size": _length,
    "packed_sequence.split_across_pack": off("whole samples are packed"),
    "packed_sequence.packing_strategy": Unused("whole samples are packed"),
    "peft.dim": "model.lora_rank",
    "peft.alpha": "model.lora_alpha",
    "peft.dropout": "model.lora_dropout",
    "peft.dropout_position": Unused("dropout is on the input of a LoRA"),
    "peft.target_modules": _pattern,
    "peft.match_all_linear": lambda draft, value: "all linear layers of the blocks",
    "peft.use_dora": "model.use_dora",
    "peft.exclude_modules": off("name the others: model.lora_modules", "*.lm_head"),
    "peft.lora_A_init": Unused("model.init_lora_weights: kaiming is the default"),
    "peft.lora_dtype": Unused("master_weights says it"),
    "quantization.load_in_4bit": four_bits,
    "quantization.load_in_8bit": off("the base is bf16 or 4 bits"),
    "quantization.bnb_4bit_quant_type": off("only NF4 is here", "nf4"),
    **rows(
        Unused("products are in bf16"),
        "quantization.bnb_4bit_compute_dtype quantization.bnb_4bit_use_double_quant "
        "quantization.bnb_4bit_quant_storage quantization._target_",
    ),
    "compile.enabled": "compile",
    **rows(_ITS_OWN, "compile.mode compile.fullgraph compile.dynamic compile.backend"),
    "neftune.noise_alpha": "neftune_noise_alpha",
    "neftune.enabled": lambda draft, value: "neftune_noise_alpha",
    "checkpoint.enabled": Unused("a run always saves, and resumes by itself"),
    "checkpoint.checkpoint_dir": Unused("each run has its own folder"),
    "checkpoint.model_save_format": Unused("checkpoints are torch's, the export is safetensors"),
    "checkpoint.save_consolidated": Unused("the export is consolidated"),
    "checkpoint.is_async": "enable_async_checkpointing",
    "checkpoint.max_recent_checkpoints": "keep_last_n_checkpoints",
    **rows(
        Unused("a checkpoint is copied to CPU memory first, and written from there"),
        "checkpoint.staging_dir checkpoint.wait_for_staging checkpoint.cpu_offload",
    ),
    "checkpoint.single_rank_consolidation": Unused("rank 0 writes the export"),
    "checkpoint.restore_from": off("start from the exported model: MODEL"),
    "wandb.project": lambda draft, value: draft.put("tracking", f"wandb:{value}"),
    **rows(
        Unused("the run's name is --name; see also tracking:"),
        "wandb.entity wandb.name wandb.save_dir wandb.mode mlflow",
    ),
    "skypilot": Unused("the cluster is Slurm"),
    **rows(
        off(_NOT_HERE), "qat fp8 longalign benchmark embedding_row_repair tool_call_eval prewarm"
    ),
    "tokenizer": off("the tokenizer is the one in the model's folder: leave it out"),
}

AUTOMODEL = Peer(
    name="NeMo Automodel",
    prefix="automodel:",
    table=TABLE,
    begin=_begin,
    end=_end,
    data=frozenset({"dataset", "validation_dataset"}),
    model=frozenset({"model.pretrained_model_name_or_path"}),
    defaults={
        "step_scheduler.local_batch_size": 1,
        "step_scheduler.num_epochs": 10,
        "clip_grad_norm.max_norm": 1.0,
        "distributed.activation_checkpointing": False,
        "model.torch_dtype": "auto",
        "optimizer.weight_decay": 0.01,
        "rng.seed": 42,
    },
)
