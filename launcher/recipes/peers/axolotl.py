"""The keys of axolotl's configs."""

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
    only_for,
    rows,
)
from launcher.recipes.peers.trainer import (
    DEFAULTS,
    FLASH,
    HUB,
    KERNELS,
    LAYOUT,
    LOADING,
    LOGGING,
    RUN_DIR,
    SHARED,
    TOKENIZER,
    VALIDATION,
    epochs,
    four_bits,
    modules,
    optimizer,
    recompute,
    reported,
    schedule,
    start_from_adapter,
    tokens,
)

_RL = {"dpo": "dpo", "ipo": "dpo", "simpo": "dpo", "orpo": "dpo", "kto": "kto"}
_OF_DATASET = names(
    "path type split name data_files ds_type field field_messages field_tools field_human "
    "field_model field_instruction field_input field_output message_property_mappings roles "
    "message_field_role message_field_content roles_to_train train_on_eos train_on_eot "
    "field_chosen field_rejected field_prompt field_completion field_label text_column revision "
    "trust_remote_code conversation chat_template"
)


def _begin(draft: Draft) -> None:
    rl = draft.get("rl")
    if rl:
        draft.entry = _RL.get(str(rl), "dpo")
    elif draft.get("reward_model"):
        draft.entry = "reward"
    elif draft.get("pretraining_dataset"):
        draft.entry = "pretrain"
    draft.method = "lora" if draft.get("adapter") in ("lora", "qlora") else "full"
    sizes = [draft.get(f"{name}_size") or 1 for name in ("dp_shard", "dp_replicate")]
    least = sizes[0] * sizes[1] * (draft.get("tensor_parallel_size") or 1)
    draft.needs(least)


def _rl(draft: Draft, value: Any) -> Answer:
    if value not in _RL:
        return Refused(f"{value} is not converted: write a recipe of entry: grpo, or {_WAY}")
    draft.put("entry", draft.entry)
    if data.form(draft).names_loss:
        draft.put("loss", value)
    return None


def _adapter(draft: Draft, value: Any) -> Answer:
    if value not in ("lora", "qlora"):
        return Refused(f"there is no adapter {value} here: use lora or qlora, or {_WAY}")
    return f"extends hub_{'qlora' if draft.get('load_in_4bit') else 'lora'}"


def _linear(draft: Draft, value: Any) -> Answer:
    return modules(draft, True) if value else Unused("it is switched off")


def _datasets(draft: Draft, value: Any) -> Answer:
    listed = value if isinstance(value, list) else [value]
    if len(listed) != 1:
        return Refused(data.ONE_DATASET)
    block = listed[0] if isinstance(listed[0], dict) else {"path": listed[0]}
    if unknown := sorted(set(block) - _OF_DATASET):
        return Refused(f"{unknown[0]} of a dataset is not known here: leave it out, or {_WAY}")
    files = block.get("data_files")
    path = str(block.get("ds_type") if files and block.get("ds_type") else block.get("path"))
    where = data.origin(draft, path, files, block.get("name"), block.get("split"))
    kind = str(block.get("type") or "")
    if data.form(draft).preferences:
        names = ("prompt", "chosen", "rejected", "completion", "label")
        columns = {name: block.get(f"field_{name}") for name in names}
        columns["prompt"] = columns["prompt"] or block.get("field_messages")
        data.preferences(draft, where, columns)
        return f"{kind or 'pairs'}: rendered by the model's own chat template"
    if data.form(draft).plain or kind in ("completion", "pretrain"):
        column = block.get("text_column") or block.get("field") or "text"
        data.put(draft, {"_component_": data.TEXTS, **where, "column": column})
        return "plain text, all of it trained"
    trained = {"train_on_input": bool(draft.get("train_on_inputs"))}
    if kind == "alpaca":
        data.put(draft, {"_component_": data.ALPACA, **where, **trained})
        draft.put("tokenizer.chat_template", data.PLAIN)
        return "Alpaca's prompt as plain text"
    if kind.startswith("chat_template") or kind == "sharegpt":
        if set(block.get("roles_to_train") or ["assistant"]) - {"assistant", "gpt"}:
            return Refused("only answers, or all turns (train_on_inputs: true), can be trained")
        mapped = dict(block.get("message_property_mappings") or {})
        role = block.get("message_field_role") or mapped.get("role", "role")
        content = block.get("message_field_content") or mapped.get("content", "content")
        styles = {("from", "value"): "sharegpt", ("role", "content"): "openai"}
        style = "sharegpt" if kind == "sharegpt" else styles.get((role, content))
        if style is None:
            return Refused("messages need role and content, or from and value: rename the fields")
        default = "conversations" if kind == "sharegpt" else "messages"
        column = block.get("field_messages") or default
        chat = {"conversation_column": column, "conversation_style": style}
        data.put(draft, {"_component_": data.CHAT, **where, **chat, **trained})
        return None
    return Refused(f"the form {kind or 'of this dataset'} is not known here: give --data FILE")


def _template(draft: Draft, value: Any) -> Answer:
    if value == "chatml":
        draft.put("tokenizer.chat_template", data.CHATML)
        return None
    return Unused(
        "the model folder's own template is used (tokenizer.chat_template is another); compare by "
        "cookbook check RECIPE --samples 3"
    )


def _length(draft: Draft, value: Any) -> Answer:
    draft.put("tokenizer.max_seq_len", value)
    return "a longer sample is truncated, where axolotl leaves it out"


def _schedule(draft: Draft, value: Any) -> Answer:
    least = draft.get("cosine_min_lr_ratio")
    answer = schedule(draft, "cosine_with_min_lr" if least and value == "cosine" else value)
    if least and answer is None:
        draft.put("lr_scheduler.min_lr_rate", least)
    return answer


def _end(draft: Draft) -> None:
    data.pack(draft, draft.get("sample_packing"))


_WAY = "start axolotl itself with this file"
_OTHER_OPTIMIZERS = off("this optimizer is not here: use torch.optim.AdamW or Muon")

TABLE: dict[str, Row] = {
    **SHARED,
    "base_model": lambda draft, value: _model(draft, value),
    "adapter": _adapter,
    "load_in_4bit": four_bits,
    "load_in_8bit": Unused("the base is held in bf16; in 4 bits: model.quantize_base: true"),
    "lora_r": "model.lora_rank",
    "lora_alpha": "model.lora_alpha",
    "lora_dropout": "model.lora_dropout",
    "lora_target_modules": modules,
    "lora_target_linear": _linear,
    "lora_modules_to_save": "model.modules_to_save",
    "lora_rank_pattern": "model.rank_pattern",
    "lora_alpha_pattern": "model.alpha_pattern",
    "lora_model_dir": start_from_adapter,
    "peft_use_dora": "model.use_dora",
    "peft_use_rslora": "model.use_rslora",
    "loraplus_lr_ratio": "model.lora_plus_ratio",
    "peft_init_lora_weights": lambda draft, value: (
        draft.put("model.init_lora_weights", value)
        if value in ("gaussian", "orthogonal", "pissa")
        else off("use kaiming, gaussian, orthogonal or pissa", True)(draft, value)
    ),
    "datasets": _datasets,
    "pretraining_dataset": _datasets,
    "test_datasets": off("name a validation set as dataset_val in the recipe, or val_set_size"),
    "val_set_size": data.validation,
    "train_on_inputs": lambda draft, value: "dataset.train_on_input",
    "sequence_len": _length,
    "sample_packing": data.packed,
    "micro_batch_size": "batch_size",
    "eval_batch_size": "batch_size_val",
    "num_epochs": epochs,
    "optimizer": optimizer,
    "lr_scheduler": _schedule,
    "cosine_min_lr_ratio": lambda draft, value: "in lr_scheduler",
    "rl": _rl,
    "rl_beta": only_for("dpo kto", "beta"),
    "dpo_beta": only_for("dpo kto", "beta"),
    "orpo_alpha": only_for("dpo kto", "beta"),
    "dpo_label_smoothing": only_for("dpo kto", "label_smoothing"),
    "rpo_alpha": only_for("dpo kto", "sft_weight"),
    "cpo_alpha": only_for("dpo kto", "sft_weight"),
    "simpo_gamma": only_for("dpo kto", "simpo_gamma"),
    "kto_desirable_weight": only_for("dpo kto", "desirable_weight"),
    "kto_undesirable_weight": only_for("dpo kto", "undesirable_weight"),
    "precompute_ref_log_probs": lambda draft, value: (
        draft.put("reference", "log_probs") if value else Unused("it is switched off")
    ),
    "reward_model": lambda draft, value: (
        draft.put("entry", "reward") if value else Unused("it is switched off")
    ),
    "center_rewards_coefficient": "center_rewards_coefficient",
    "dp_shard_size": "data_parallel_shard_dim",
    "dp_replicate_size": "data_parallel_replicate_dim",
    "tensor_parallel_size": "tensor_parallel_dim",
    "expert_parallel_size": "expert_parallel_dim",
    "context_parallel_size": off(f"sequences are not split over GPUs: {_WAY}", 1),
    "sequence_parallel_degree": off(f"sequences are not split over GPUs: {_WAY}", 1),
    "fsdp_config.offload_params": lambda draft, value: _offload(draft, value),
    "fsdp_config.fsdp_offload_params": lambda draft, value: _offload(draft, value),
    "fsdp_config.activation_checkpointing": recompute,
    "fsdp_config.reshard_after_forward": "fsdp_reshard_after_forward",
    **{
        f"fsdp_config.{prefix}{name}": LAYOUT
        for prefix in ("", "fsdp_")
        for name in names(
            "auto_wrap_policy transformer_layer_cls_to_wrap state_dict_type final_state_dict_type "
            "sync_module_states cpu_ram_efficient_loading use_orig_params limit_all_gathers "
            "sharding_strategy backward_prefetch forward_prefetch version min_num_params "
            "mixed_precision_policy cpu_offload_pin_memory"
        )
    },
    "fsdp_config.fsdp_activation_checkpointing": recompute,
    "chat_template": _template,
    "chat_template_jinja": "tokenizer.chat_template",
    "chat_template_kwargs": "tokenizer.chat_template_kwargs",
    "default_system_message": off("write it into the data, or dataset.new_system_prompt"),
    "tokens": tokens,
    "special_tokens": Unused("there are none"),
    "special_tokens.additional_special_tokens": tokens,
    **rows(
        TOKENIZER,
        "special_tokens.eos_token special_tokens.bos_token special_tokens.unk_token "
        "tokenizer_type tokenizer_config tokenizer_use_fast tokenizer_legacy "
        "added_tokens_overrides eot_tokens tokenizer_use_mistral_common",
    ),
    "special_tokens.pad_token": Unused("padding is neither attended to nor trained"),
    "wandb_project": lambda draft, value: draft.put("tracking", f"wandb:{value}"),
    "use_wandb": lambda draft, value: reported(draft, "wandb" if value else []),
    "use_mlflow": lambda draft, value: reported(draft, "mlflow" if value else []),
    "mlflow_tracking_uri": lambda draft, value: draft.put("tracking", value),
    "freeze_mm_modules": LOADING,
    "unfrozen_parameters": off("name the frozen ones: freeze"),
    "fp8": lambda draft, value: (
        draft.put("enable_fp8_training", True) if value else Unused("it is switched off")
    ),
    "trl": off(f"keys of GRPO are not converted: {_WAY}"),
    "excess_length_strategy": off("longer samples are truncated", "truncate", "drop"),
    "relora": off(f"ReLoRA is not here: {_WAY}"),
    "peft_layers_to_transform": off("use model.rank_pattern, or freeze"),
    "curriculum_sampling": off("samples are drawn in random order"),
    "sample_packing_sequentially": off("samples are packed in random order: leave it out"),
    "num_labels": off("a reward model has one score", 1),
    "cls_model_config": Unused("the head follows from the entry"),
    **rows(
        off(f"its method is not in this kit: {_WAY}"),
        "lisa_n_layers lisa_step_interval lisa_layers_attribute loftq_bits loftq_config gptq "
        "process_reward_model use_eaft eaft_alpha qat quantization ebft vllm use_pose "
        "dpo_use_weighting dpo_loss_type dpo_loss_weights dpo_norm_loss lora_target_parameters "
        "rope_scaling overrides_of_model_config processor_type reinit_weights peft trainer_cls "
        "embedding_lr embedding_lr_scale lr_groups lr_quadratic_warmup cosine_constant_lr_ratio "
        "peft_layer_replication loraplus_lr_embedding noisy_embedding_alpha "
        "early_stopping_patience",
    ),
    **rows(
        FLASH,
        "attn_implementation flash_attention sdp_attention xformers_attention flex_attention "
        "sage_attention eager_attention s2_attention pretrain_multipack_attn "
        "flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp sdpa_varlen",
    ),
    **rows(
        KERNELS,
        "plugins liger_rope liger_rms_norm liger_glu_activation liger_layer_norm "
        "liger_fused_linear_cross_entropy liger_cross_entropy cut_cross_entropy lora_mlp_kernel "
        "lora_qkv_kernel lora_o_kernel lora_embedding_kernel chunked_cross_entropy "
        "chunked_cross_entropy_num_chunks tiled_mlp unsloth_cross_entropy_loss use_kernels "
        "liger_swiglu dpo_use_liger_kernel dpo_padding_free",
    ),
    **rows(
        LOADING,
        "dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory "
        "shuffle_merged_datasets shuffle_before_merging_datasets skip_prepare_dataset "
        "pad_to_sequence_len pad_to_multiple_of sample_packing_bin_size sample_packing_group_size "
        "streaming streaming_multipack_buffer_size pretrain_multipack_buffer_size device_map "
        "low_cpu_mem_usage max_memory gpu_memory_limit lora_on_cpu lora_fan_in_fan_out gc_steps "
        "qlora_sharded_model_loading bnb_config_kwargs multipack_real_batches batch_flattening "
        "model_type base_model_config type_of_model is_llama_derived_model strict device "
        "is_mistral_derived_model is_qwen_derived_model is_falcon_derived_model float16 bfloat16 "
        "dataset_exact_deduplication local_rank world_size ddp base_model_ignore_patterns "
        "fsdp_final_state_dict_type peft_autocast_adapter_dtype resize_token_embeddings_to_32x",
    ),
    **rows(
        VALIDATION,
        "eval_sample_packing eval_table_size eval_max_new_tokens "
        "do_causal_lm_eval eval_causal_lm_metrics evaluation_strategy eval_sequence_len "
        "do_bench_eval bench_dataset",
    ),
    **rows(
        LOGGING,
        "wandb_entity wandb_watch wandb_name wandb_log_model wandb_run_id wandb_mode "
        "mlflow_experiment_name mlflow_run_name hf_mlflow_log_artifacts use_tensorboard "
        "profiler_steps profiler_steps_start include_tokens_per_second include_tkps use_comet "
        "comet_project_name use_trackio use_otel_metrics",
    ),
    **rows(HUB, "push_dataset_to_hub hf_use_auth_token"),
    **rows(RUN_DIR, "save_safetensors auto_resume_from_checkpoints save_first_step"),
    "evals_per_epoch": Unused(
        "run_val_every_n_steps counts steps: set it; without it each epoch ends with a validation"
    ),
    "saves_per_epoch": Unused(
        "save_every_n_steps counts steps, 100 by default; each run ends with a checkpoint"
    ),
    **rows(
        Unused("a NaN ends the run after max_non_finite_steps; nothing else watches the loss"),
        "loss_watchdog_threshold loss_watchdog_patience",
    ),
    **rows(Unused("the cluster is Slurm"), "use_ray ray_run_name ray_num_workers"),
    "fsdp": lambda draft, value: _offload(draft, "offload" in str(value)),
    **rows(
        _OTHER_OPTIMIZERS,
        "torchdistx_path adam_beta3 adam_epsilon2 dion_lr dion_momentum qgalore_rank",
    ),
}


def _model(draft: Draft, value: Any) -> Answer:
    draft.model = str(value)
    return f"the model {value}"


def _offload(draft: Draft, value: Any) -> Answer:
    if not value:
        return LAYOUT
    draft.put("fsdp_cpu_offload", True)
    return None


AXOLOTL = Peer(
    name="axolotl",
    prefix="axolotl:",
    table=TABLE,
    begin=_begin,
    end=_end,
    data=frozenset({"datasets", "pretraining_dataset", "test_datasets"}),
    model=frozenset({"base_model"}),
    defaults={
        "learning_rate": DEFAULTS["learning_rate"],
        "weight_decay": 0.0,
        "optimizer": "adamw_torch_fused",
        "lr_scheduler": "cosine",
        "warmup_ratio": 0.03,
        "max_grad_norm": 1.0,
        "num_epochs": 1,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "seed": 42,
        "sequence_len": 512,
        "gradient_checkpointing": False,
        "bf16": "auto",
    },
)
