"""Rows that axolotl, LLaMA-Factory and TRL have in common: transformers' TrainingArguments, PEFT.

Their Trainer's loss is the mean over the trained tokens of the whole batch, as here.
"""

from typing import Any

from launcher.recipes.peers.table import (
    Answer,
    Draft,
    Refused,
    Row,
    Unused,
    off,
    rows,
    switch,
    whole,
)

_ADAMW = (
    "adamw_torch adamw_torch_fused adamw_hf paged_adamw_32bit adamw_apex_fused adamw_anyprecision"
)
_ADAMW8 = "adamw_8bit adamw_bnb_8bit paged_adamw_8bit adamw_torch_8bit"
OPTIMIZERS = {
    **dict.fromkeys(_ADAMW.split(), "torch.optim.AdamW"),
    **dict.fromkeys(_ADAMW8.split(), "torchao.optim.AdamW8bit"),
    "sgd": "torch.optim.SGD",
    "rmsprop": "torch.optim.RMSprop",
    "adagrad": "torch.optim.Adagrad",
}
SCHEDULES = {
    "cosine": "get_cosine_schedule_with_warmup",
    "linear": "get_linear_schedule_with_warmup",
    "constant": "get_constant_schedule",
    "constant_with_warmup": "get_constant_schedule_with_warmup",
    "inverse_sqrt": "get_inverse_sqrt_schedule",
    "cosine_with_restarts": "get_cosine_with_hard_restarts_schedule_with_warmup",
    "cosine_with_min_lr": "get_cosine_with_min_lr_schedule_with_warmup",
    "polynomial": "get_polynomial_decay_schedule_with_warmup",
    "warmup_stable_decay": "get_wsd_schedule",
}


def hub_model(draft: Draft, value: Any) -> Answer:
    """A folder, or a model of the hub at the revision that the config names."""
    revision = draft.get("model_revision")
    draft.model = str(value) + (f"@{revision}" if revision and revision != "main" else "")
    return f"the model {draft.model}"


def optimizer(draft: Draft, value: Any) -> Answer:
    """Adam's forms are one; a decay spares norms and biases, as transformers' Trainer does."""
    name = OPTIMIZERS.get(str(value))
    if name is None:
        return Refused(
            f"there is no {value} here: leave the key out for torch.optim.AdamW, or set "
            "optimizer._component_ in the recipe (docs/training.md)"
        )
    draft.put("optimizer._component_", name)
    if draft.get("weight_decay"):
        draft.put("optimizer.no_weight_decay", ["norm", "bias"])
    return None


def schedule(draft: Draft, value: Any) -> Answer:
    """The schedule with its warm-up; transformers' functions have the same names."""
    name = SCHEDULES.get(str(value))
    if name is None:
        known = ", ".join(SCHEDULES)
        return Refused(f"there is no schedule {value} here; there are {known}")
    draft.put("lr_scheduler._component_", f"transformers.{name}")
    if value != "constant":
        steps, ratio = draft.get("warmup_steps"), draft.get("warmup_ratio")
        by_ratio = not steps and ratio and (steps is None or draft.given.get("warmup_ratio"))
        share = ratio if by_ratio else steps if steps and steps < 1 else None
        key = "num_warmup_steps" if share is None else "warmup_ratio"
        draft.put(f"lr_scheduler.{key}", int(steps or 0) if share is None else share)
    return None


def warmup(draft: Draft, value: Any) -> Answer:
    """The schedule's row puts it into the recipe."""
    used = draft.values.get("lr_scheduler.warmup_ratio") == value
    used = used or draft.values.get("lr_scheduler.num_warmup_steps") == value
    used = used or "lr_scheduler._component_" not in draft.values
    return "in lr_scheduler" if used and value else Unused("the schedule has no such warm-up")


def schedule_arguments(draft: Draft, value: Any) -> Answer:
    """What else the schedule's function takes."""
    for name, each in value.items() if isinstance(value, dict) else ():
        draft.put(f"lr_scheduler.{name}", each)
    return None


def beta(draft: Draft, value: Any) -> Answer:
    """Both decay rates of Adam are one key here."""
    pair = [draft.get("adam_beta1") or 0.9, draft.get("adam_beta2") or 0.999]
    draft.put("optimizer.betas", pair)
    return None


def clip(draft: Draft, value: Any) -> Answer:
    """0 stands for no clipping."""
    draft.put("clip_grad_norm", value or None)
    return None


def steps(draft: Draft, value: Any) -> Answer:
    """The data are repeated as often as the steps need."""
    if not isinstance(value, int) or value < 1:
        return Unused("it sets no limit")
    draft.put("max_steps", value)
    draft.put("epochs", 1000)
    return "max_steps ends the training, after as many passes as it takes"


def epochs(draft: Draft, value: Any) -> Answer:
    """Whole passes over the data."""
    if (draft.get("max_steps") or -1) > 0:
        return Unused("max_steps ends the training")
    return whole("epochs")(draft, value)


def recompute(draft: Draft, value: Any) -> Answer:
    """Activation checkpointing of whole layers, with or without offloading."""
    draft.put("activation_checkpointing", "full" if value else "none")
    if value == "offload":
        draft.put("enable_activation_offloading", True)
    return None


def bf16(draft: Draft, value: Any) -> Answer:
    """Weights in bf16; adapters, which PEFT holds in fp32, keep fp32 weights."""
    draft.put("dtype", "bf16" if value else "fp32")
    if value and draft.method != "full":
        draft.put("master_weights", "fp32")
    return None


def modules(draft: Draft, value: Any) -> Answer:
    """Names of layers; all linear layers are the kit's default."""
    if value in ("all", "all-linear", ["all"], ["all-linear"], True):
        return "all linear layers of the blocks, the default of model.lora_modules"
    listed = value.split(",") if isinstance(value, str) else value
    names = [str(name).strip() for name in listed]
    if any(set(name) & set("*^$()|\\") for name in names):
        return Refused("patterns of layers: write their names as model.lora_modules, or leave out")
    draft.put("model.lora_modules", names)
    return None


def four_bits(draft: Draft, value: Any) -> Answer:
    """QLoRA's base in NF4."""
    if not value:
        return Unused("it is switched off")
    if draft.method == "full":
        return Refused("weights in 4 bits cannot be trained: name an adapter, or leave it out")
    draft.method = "qlora"
    return "the base in 4 bits (NF4): extends hub_qlora"


def deepspeed(draft: Draft, value: Any) -> Answer:
    """ZeRO's stages shard as FSDP does; an offload is told by the file's name."""
    if value and "offload" in str(value):
        draft.put("fsdp_cpu_offload", True)
        return "FSDP shards weights, gradients and optimizer state, as ZeRO 3 does"
    return Unused("FSDP shards weights, gradients and optimizer state over all GPUs, as ZeRO 3")


def saved(draft: Draft, value: Any) -> Answer:
    """Steps between checkpoints; a share of all steps is no number of steps."""
    if not isinstance(value, int) or value < 1:
        return Unused("save_every_n_steps counts steps, 100 by default")
    if draft.get("save_strategy") in ("no", "epoch"):
        return Unused(f"save_strategy is {draft.get('save_strategy')}")
    draft.put("save_every_n_steps", value)
    return None


def validated(draft: Draft, value: Any) -> Answer:
    """Steps between validations."""
    if not isinstance(value, int) or value < 1:
        return Unused("run_val_every_n_steps counts steps; default: after each epoch")
    if draft.get("eval_strategy") in ("no", "epoch"):
        return Unused(f"eval_strategy is {draft.get('eval_strategy')}")
    draft.put("run_val_every_n_steps", value)
    return None


def reported(draft: Draft, value: Any) -> Answer:
    """W&B and MLflow are written from the run's own metrics."""
    names = [value] if isinstance(value, str) else list(value or [])
    tracker = next((name for name in names if name in ("wandb", "mlflow")), None)
    if tracker is None:
        return Unused("metrics go to metrics.jsonl and TensorBoard; tracking: mlflow or wandb")
    draft.put("tracking", tracker)
    return None


def strategy(draft: Draft, value: Any) -> Answer:
    """When to save, validate or log: the numbers of steps say it."""
    return Unused("the number of steps says it; each run ends with a checkpoint and a validation")


def start_from_adapter(draft: Draft, value: Any) -> Answer:
    """An adapter to go on with."""
    name = value[0] if isinstance(value, list) and value else str(value)
    file = name if str(name).endswith(".safetensors") else f"{name}/adapter_model.safetensors"
    draft.put("checkpointer.adapter_checkpoint", file)
    return None


def tokens(draft: Draft, value: Any) -> Answer:
    """Additional tokens of the vocabulary."""
    names = value if isinstance(value, list) else [t.strip() for t in str(value).split(",")]
    if not names:
        return Unused("there are none")
    draft.put("tokenizer.new_tokens", names)
    return None


FLASH = Unused("the trainer chooses the attention kernel; packed documents do not see each other")
KERNELS = Unused("the trainer has its own: a fused loss over the head, and compile: true")
RUN_DIR = Unused("each run has its own folder, and resumes by itself: cookbook resume RUN")
LOADING = Unused("it is about loading the data or the model, and changes no result")
LOGGING = Unused("the run has metrics.jsonl, TensorBoard and logs; see also tracking:")
HUB = Unused("nothing is uploaded: push the run's export/ by hf upload")
LAYOUT = Unused("FSDP2 over all GPUs is the default; see data_parallel_shard_dim")
TOKENIZER = Unused("the model folder's tokenizer is used as it is")
VALIDATION = Unused("val_loss is a mean over tokens, and the same in every batch")

# What axolotl names in the same way.
SHARED: dict[str, Row] = {
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "adam_epsilon": "optimizer.eps",
    "adam_beta1": beta,
    "adam_beta2": beta,
    "max_grad_norm": clip,
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "lr_scheduler_kwargs": schedule_arguments,
    "warmup_ratio": warmup,
    "warmup_steps": warmup,
    "max_steps": steps,
    "bf16": bf16,
    "fp16": off("fp16 needs loss scaling, which the kit does not have: use bf16"),
    "gradient_checkpointing": recompute,
    "torch_compile": switch("compile"),
    "neftune_noise_alpha": "neftune_noise_alpha",
    "deepspeed": deepspeed,
    "seed": "seed",
    "save_steps": saved,
    "save_total_limit": whole("keep_last_n_checkpoints"),
    "save_strategy": strategy,
    "eval_steps": validated,
    "eval_strategy": strategy,
    "logging_steps": whole("log_every_n_steps"),
    "dataloader_num_workers": "num_workers",
    "load_best_model_at_end": lambda draft, value: (
        draft.put("export_checkpoint", "best") if value else Unused("it is switched off")
    ),
    "trust_remote_code": Unused(
        "the model's class is transformers' own; no repository's code runs"
    ),
    "metric_for_best_model": off(
        "the best checkpoint has the lowest val_loss", "loss", "eval_loss"
    ),
    "greater_is_better": off("the best checkpoint has the lowest val_loss"),
    "optim_args": off("write the arguments under optimizer: in the recipe"),
    "optim_target_modules": off("GaLore, APOLLO and the like are not here: use a LoRA"),
    "group_by_length": Unused("packing wastes less; samples are drawn in random order"),
    "auto_find_batch_size": Unused("cookbook estimate RECIPE --tune finds the batch size"),
    "accelerator_config": Unused("the job starts the ranks; see docs/training.md"),
    "save_only_model": Unused("checkpoints hold what a run needs to resume; export/ the model"),
    "remove_unused_columns": LOADING,
    **rows(RUN_DIR, "output_dir resume_from_checkpoint"),
    **rows(HUB, "hub_model_id hub_strategy hub_revision push_to_hub hub_token hub_private_repo"),
    **rows(Unused("it is about products in fp32, and these are in bf16"), "tf32"),
    **rows(LAYOUT, "fsdp_version ddp_find_unused_parameters ddp_bucket_cap_mb ddp_timeout"),
    **rows(LAYOUT, "ddp_broadcast_buffers"),
    **rows(LOADING, "dataloader_pin_memory dataloader_prefetch_factor dataloader_drop_last"),
    **rows(LOADING, "gradient_checkpointing_kwargs torch_empty_cache_steps"),
    **rows(KERNELS, "torch_compile_backend torch_compile_mode torch_compile_options"),
}

# transformers.TrainingArguments, of TRL and LLaMA-Factory.
ARGUMENTS: dict[str, Row] = {
    **SHARED,
    "per_device_train_batch_size": "batch_size",
    "per_device_eval_batch_size": "batch_size_val",
    "num_train_epochs": epochs,
    "optim": optimizer,
    "lr_scheduler_type": schedule,
    "report_to": reported,
    "fsdp": lambda draft, value: (
        draft.put("fsdp_cpu_offload", True) if "offload" in str(value) else LAYOUT
    ),
    "fsdp_config": Unused(LAYOUT.reason),
    "label_smoothing_factor": off("label smoothing is not in the trainer's loss: leave it out"),
    "full_determinism": lambda draft, value: (
        draft.put("cudnn_deterministic_mode", 2) if value else Unused("it is switched off")
    ),
    "parallelism_config": off("set tensor_parallel_dim and data_parallel_replicate_dim instead"),
    "train_sampling_strategy": off("samples are drawn in random order", "random"),
    "use_cpu": lambda draft, value: draft.put("device", "cpu") if value else Unused("off"),
    "do_predict": off("cookbook eval RUN answers and scores; leave it out"),
    "predict_with_generate": off("cookbook eval RUN answers and scores; leave it out"),
    "data_seed": Unused("seed orders the samples, too"),
    **rows(KERNELS, "use_liger_kernel liger_kernel_config use_cache"),
    **rows(
        Unused("the run trains; a dataset_val is validated"),
        "do_train do_eval overwrite_output_dir",
    ),
    **rows(
        LOGGING,
        "logging_strategy logging_first_step log_on_each_node logging_nan_inf_filter log_level "
        "log_level_replica disable_tqdm run_name project trackio_space_id logging_dir "
        "include_num_input_tokens_seen include_tokens_per_second plot_loss debug "
        "skip_memory_metrics trackio_bucket_id trackio_static_space_id",
    ),
    **rows(
        VALIDATION,
        "eval_delay eval_on_start eval_do_concat_batches eval_accumulation_steps bf16_full_eval "
        "fp16_full_eval prediction_loss_only include_for_metrics batch_eval_metrics "
        "eval_use_gather_object",
    ),
    **rows(
        RUN_DIR,
        "save_on_each_node enable_jit_checkpoint ignore_data_skip save_safetensors "
        "restore_callback_states_from_checkpoint hub_always_push",
    ),
    **rows(
        LOADING,
        "dataloader_persistent_workers dataloader_multiprocessing_context dataloader_in_order "
        "label_names length_column_name local_rank ddp_static_graph ddp_backend "
        "average_tokens_across_devices",
    ),
}

# What these trainers do if the file does not say it.
DEFAULTS: dict[str, Any] = {
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "optim": "adamw_torch",
    "lr_scheduler_type": "linear",
    "max_grad_norm": 1.0,
    "num_train_epochs": 3,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "seed": 42,
}
