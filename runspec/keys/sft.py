"""The keys of `entry: sft`, the kit's trainer; torchtune's name if torchtune has the key."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runspec.keys.key import REQUIRED, Key

GROUPS: dict[str, tuple[Key, ...]] = {}
GROUPS["Model"] = (
    Key(
        "model",
        "component",
        REQUIRED,
        "Builder of the model and its arguments: a plain one trains all weights, lora_* trains "
        "adapters, qlora_* trains adapters over a 4-bit base.",
    ),
    Key("model.lora_attn_modules", "texts", None, "LoRA on q_proj, k_proj, v_proj, output_proj."),
    Key("model.apply_lora_to_mlp", "flag", False, "LoRA on the MLP's layers too."),
    Key("model.lora_rank", "positive", 8, "LoRA's rank: higher learns more, needs more memory."),
    Key("model.lora_alpha", "number", 16, "LoRA's updates are scaled by lora_alpha / lora_rank."),
    Key("model.lora_dropout", "rate", 0.0, "Dropout on the input of LoRA's layers."),
    Key("model.use_dora", "flag", False, "DoRA: also train a magnitude for each row."),
    Key(
        "model.quantize_base", "flag", False, "Keep the frozen base in 4 bits (NF4); qlora_* does."
    ),
    Key("tokenizer", "component", REQUIRED, "Builder of the tokenizer, with its chat template."),
    Key("tokenizer.path", "text", None, "Folder or file of the tokenizer."),
    Key("tokenizer.max_seq_len", "positive", None, "Longest sample, or length of a packed row."),
    Key("checkpointer", "open block", REQUIRED, "The model's folder."),
    Key("checkpointer.checkpoint_dir", "text", REQUIRED, "Folder of config.json and weights."),
    Key("checkpointer.checkpoint_files", "any", None, "Weights. Default: all *.safetensors there."),
    Key("checkpointer.model_type", "text", None, "torchtune's name of the family: LLAMA3."),
    Key("checkpointer.adapter_checkpoint", "text", None, "Adapter to start from (safetensors)."),
    Key("checkpointer.recipe_checkpoint", "text", None, "State of a run of torchtune's trainer."),
    Key("checkpointer.output_dir", "text", None, "Folder for checkpoints."),
    Key("resume_from_checkpoint", "flag", False, "Continue a run of torchtune's trainer."),
)
GROUPS["Data"] = (
    Key("dataset", "component", REQUIRED, "Builder of the dataset and its arguments."),
    Key("dataset.source", "text", None, "Dataset of the hub; or json, csv, parquet, text."),
    Key("dataset.data_files", "any", None, "Your own files: /shared/my.jsonl, or a list."),
    Key("dataset.split", "text", "train", "Split, or a part of one: train[:95%]."),
    Key("dataset.train_on_input", "flag", None, "Train on the prompt's tokens too."),
    Key(
        "dataset.packed",
        "flag",
        False,
        "Put whole samples side by side into rows of tokenizer.max_seq_len tokens. No sample sees "
        "another; batch_size then counts rows.",
    ),
    Key("dataset.split_across_pack", "flag", False, "Fill rows by cutting samples."),
    Key(
        "dataset_val",
        "open block",
        None,
        "Dataset for validation; what it leaves out is as in dataset: dataset_val.split=test.",
    ),
    Key("data_cache_dir", "text", None, "Folder of tokenised data. Default: runs/.data_cache."),
    Key("shuffle", "flag", True, "Shuffle the samples in each epoch."),
    Key("seed", "count", 0, "Seed of the order of samples, of dropout and of new adapters."),
    Key("num_workers", "count", None, "Processes per rank that read ahead. Default: 2 with GPUs."),
    Key(
        "collate_fn",
        "torchtune.data.padded_collate_sft | torchtune.data.padded_collate_packed",
        None,
        "How samples become a batch.",
    ),
)
GROUPS["Training"] = (
    Key(
        "batch_size",
        "positive",
        REQUIRED,
        "Samples or packed rows per micro-step and GPU (per group of tensor-parallel GPUs).",
    ),
    Key("batch_size_val", "positive", None, "The same for validation. Default: batch_size."),
    Key("gradient_accumulation_steps", "positive", 1, "Micro-steps per optimizer step."),
    Key("epochs", "positive", 1, "Passes over the dataset."),
    Key("max_steps", "positive", None, "Stop after so many optimizer steps."),
    Key("max_steps_per_epoch", "positive", None, "End each epoch after so many optimizer steps."),
    Key("optimizer", "component", REQUIRED, "The optimizer and its arguments."),
    Key("optimizer.lr", "rate", None, "Learning rate."),
    Key("optimizer.weight_decay", "rate", None, "Weight decay."),
    Key("optimizer.betas", "list", None, "Adam's decay rates: [0.9, 0.95]."),
    Key("optimizer.eps", "rate", None, "Adam's epsilon."),
    Key("lr_scheduler", "component", None, "Learning rate schedule. Default: a constant rate."),
    Key("lr_scheduler.num_warmup_steps", "count", None, "Steps in which the rate rises from 0."),
    Key(
        "loss",
        "component",
        {"_component_": "torch.nn.CrossEntropyLoss"},
        "The loss; trainer.layers.loss.LinearCrossEntropy never holds all logits.",
    ),
    Key("clip_grad_norm", "number", None, "Largest norm of the gradients. Default: no clipping."),
    Key("max_non_finite_steps", "positive", 3, "NaN or infinite steps in a row that end the run."),
    Key("optimizer_in_bwd", "flag", False, "Step the optimizer during the backward pass."),
)
GROUPS["Memory and precision"] = (
    Key("device", "auto | cuda | cpu", "auto", "auto: GPUs if there are any, else CPUs."),
    Key("dtype", "bf16 | fp32", "bf16", "Type of weights and of computing."),
    Key("master_weights", "fp32", None, "fp32 for trained weights and optimizer state."),
    Key(
        "activation_checkpointing",
        "layers",
        None,
        "What the backward pass recomputes: none; full, every layer; n, every n-th layer; op, in "
        "each layer all but matrix products and attention. Default: none.",
    ),
    Key("enable_activation_checkpointing", "flag", False, "As activation_checkpointing=full."),
    Key("ac_mode", "none | full | selective", None, "torchtune's way to say it; see ac_option."),
    Key("ac_option", "any", None, "With ac_mode=selective: op or n."),
    Key("enable_activation_offloading", "flag", False, "Keep inputs of recomputed layers on CPUs."),
    Key("compile", "flag", False, "torch.compile each layer; the first step takes a minute more."),
    Key("enable_fp8_training", "flag", False, "Multiply in fp8 (H100, L40S and later)."),
    Key("fp8_recipe_name", "tensorwise | rowwise", "tensorwise", "Scale per tensor or per row."),
    Key("low_cpu_ram", "flag", False, "Load the model with less CPU memory."),
)
GROUPS["Layout over GPUs"] = (
    Key("tensor_parallel_dim", "positive", 1, "GPUs of a node that split each layer."),
    Key("data_parallel_replicate_dim", "positive", 1, "Data-parallel replicas (HSDP)."),
    Key(
        "data_parallel_shard_dim",
        "dimension",
        -1,
        "GPUs that FSDP shards each replica over; -1: all that are left.",
    ),
    Key(
        "sync_each_micro_batch",
        "flag",
        None,
        "Reduce gradients after each micro-step: more traffic, less memory. Default: with "
        "fsdp_cpu_offload.",
    ),
    Key("custom_sharded_layers", "texts", None, "Layers to shard on their own: tok_embeddings."),
    Key("fsdp_cpu_offload", "flag", False, "Weights, gradients and optimizer in CPU memory."),
    Key("fsdp", "block", None, "torchtune's older block."),
    Key("fsdp.cpu_offload", "flag", False, "As fsdp_cpu_offload."),
    Key("fsdp_reshard_after_forward", "flag", True, "Gather weights again for the backward pass."),
    Key("fsdp_prefetch", "count", None, "Blocks to gather ahead. Default: FSDP's own choice."),
    Key("fsdp_reduce_dtype", "fp32 | bf16", "fp32", "Type in which gradients are summed."),
    Key("tensor_parallel_plan", "open block", None, "How tensor parallelism splits layers."),
    Key("memory_efficient_fsdp_wrap", "flag", False, "Shard embedding and output on their own."),
)
GROUPS["Checkpoints and export"] = (
    Key("save_every_n_steps", "count", None, "Steps between checkpoints. Default: at the end."),
    Key("save_every_minutes", "number", None, "Minutes between checkpoints."),
    Key("keep_last_n_checkpoints", "positive", 2, "Newest checkpoints to keep."),
    Key("enable_async_checkpointing", "flag", False, "Train on while a checkpoint is written."),
    Key(
        "export_checkpoint",
        "best | last",
        None,
        "Checkpoint to export; best: lowest validation loss. Default: best with dataset_val.",
    ),
    Key("save_adapter_weights_only", "flag", False, "Export the adapter, not the merged model."),
)
GROUPS["Logging and profiling"] = (
    Key("log_every_n_steps", "positive", 1, "Steps between lines of metrics."),
    Key("run_val_every_n_steps", "positive", None, "Steps between validations. Default: an epoch."),
    Key("cudnn_deterministic_mode", "count", None, "0 off, 1 warn, 2 fail, as torch's debug mode."),
    Key("generate", "block", None, "Questions that the finished model answers."),
    Key("generate.prompts", "texts", REQUIRED, "The questions."),
    Key("generate.max_new_tokens", "positive", 128, "Longest answer in tokens."),
    Key("profiler", "block", None, "torch.profiler. Option: --profile."),
    Key("profiler.enabled", "flag", False, "Record traces for TensorBoard."),
    Key("profiler.cpu", "flag", True, "Record operations on the CPU."),
    Key("profiler.cuda", "flag", True, "Record kernels on the GPU."),
    Key("profiler.profile_memory", "flag", False, "Record memory."),
    Key("profiler.with_stack", "flag", False, "Record Python's call stacks."),
    Key("profiler.record_shapes", "flag", True, "Record shapes of tensors."),
    Key("profiler.with_flops", "flag", False, "Count FLOPs."),
    Key("profiler.wait_steps", "count", 5, "Steps before the warm-up of each cycle."),
    Key("profiler.warmup_steps", "count", 3, "Steps that are recorded and dropped."),
    Key("profiler.active_steps", "positive", 2, "Steps that are recorded and kept."),
    Key("profiler.num_cycles", "count", 1, "Number of cycles; 0: until the end."),
    Key("profiler.steps", "steps", None, "First and last step to record, instead of cycles."),
    Key("profiler.ranks", "ranks", None, "Ranks to record. Default: the first of each node."),
    Key("profiler.memory_snapshot", "flag", False, "Record a snapshot for torch's memory viewer."),
    Key("profiler._component_", "text", None, "torchtune's profiler; it is torch.profiler."),
    Key("profiler.output_dir", "text", None, "Folder for traces."),
    Key("profiler.xpu", "flag", False, "Record Intel GPUs."),
    Key("metric_logger", "open block", None, "torchtune's logger."),
    Key("log_peak_memory_stats", "flag", False, "Log peak memory."),
)

# Accepted because torchtune's configs hold them; they change nothing here, and why.
_UNUSED = {
    "checkpointer.output_dir": "checkpoints go to the run's directory",
    "collate_fn": "the trainer makes batches by itself, with the same result",
    "dataset.split_across_pack": "samples are packed whole",
    "log_peak_memory_stats": "peak memory is always logged",
    "low_cpu_ram": "weights are always read tensor by tensor",
    "memory_efficient_fsdp_wrap": "each block is sharded on its own; see custom_sharded_layers",
    "metric_logger": "metrics go to metrics.jsonl and TensorBoard",
    "optimizer_in_bwd": "the optimizer steps after the backward pass",
    "profiler.output_dir": "traces go to the run's directory",
    "profiler.xpu": "Intel GPUs are not supported",
    "tensor_parallel_plan": "the trainer has its own plan",
}
# They would change the result and cannot be followed; what to do instead.
_REFUSED = {
    "checkpointer.recipe_checkpoint": "the trainer cannot read the state of torchtune's trainer; "
    "start from its weights with checkpointer.checkpoint_dir, or from its adapter with "
    "checkpointer.adapter_checkpoint",
    "resume_from_checkpoint": "a run resumes by itself after a fault, and an ended one with "
    "cookbook resume RUN; to start from an adapter set checkpointer.adapter_checkpoint",
}
# Keys that may change when a run resumes; a block stands for its keys.
_MAY_CHANGE = """
    checkpointer.checkpoint_dir checkpointer.checkpoint_files checkpointer.model_type
    dataset_val batch_size_val data_cache_dir num_workers
    epochs max_steps clip_grad_norm max_non_finite_steps
    optimizer.lr optimizer.weight_decay optimizer.betas optimizer.eps lr_scheduler
    device activation_checkpointing enable_activation_checkpointing ac_mode ac_option
    enable_activation_offloading compile
    tensor_parallel_dim data_parallel_replicate_dim data_parallel_shard_dim sync_each_micro_batch
    custom_sharded_layers fsdp fsdp_cpu_offload fsdp_reshard_after_forward fsdp_prefetch
    save_every_n_steps save_every_minutes keep_last_n_checkpoints enable_async_checkpointing
    export_checkpoint save_adapter_weights_only
    log_every_n_steps run_val_every_n_steps cudnn_deterministic_mode generate profiler
"""
# One choice under two names: whichever is given last counts.
_NEW, _OLD = "activation_checkpointing", ("enable_activation_checkpointing", "ac_mode")
_REPLACES = {_NEW: _OLD} | dict.fromkeys(_OLD, (_NEW,))

SFT = {
    key.name: replace(
        key,
        unused=_UNUSED.get(key.name, ""),
        refused=_REFUSED.get(key.name, ""),
        may_change=key.name in _MAY_CHANGE.split() or key.name in _UNUSED,
        replaces=_REPLACES.get(key.name, ()),
    )
    for group in GROUPS.values()
    for key in group
}


def recomputed(config: Mapping[str, Any]) -> int | str | None:
    """Return what the backward pass recomputes, from the one key or from torchtune's three.

    n: every n-th layer (1: all). "op": all but matrix products and attention. None: nothing.
    """
    mode = config.get("activation_checkpointing") or config.get("ac_mode")
    if mode == "selective":
        mode = config.get("ac_option")
    if mode is None:
        mode = "full" if config.get("enable_activation_checkpointing") else "none"
    if mode in ("none", "full", "op"):
        return {"none": None, "full": 1, "op": "op"}[str(mode)]
    return int(mode) if str(mode).isdigit() else None
