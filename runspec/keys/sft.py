"""The keys of `entry: sft`, the kit's trainer; torchtune's name if torchtune has the key."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from runspec.keys.key import REQUIRED, Key

# model._component_ of a model that its folder's config.json names: transformers has the code.
TRANSFORMERS = "transformers"
# Builders of torchtune's whose train_on_input is true if a config leaves it out; here it is false.
TRAINS_PROMPTS = (
    "torchtune.datasets.alpaca_dataset",
    "torchtune.datasets.alpaca_cleaned_dataset",
)

GROUPS: dict[str, tuple[Key, ...]] = {}
GROUPS["Model"] = (
    Key(
        "model",
        "open block",
        "The model and its adapters. Without _component_ (or with transformers) the config.json in "
        "checkpointer.checkpoint_dir defines the model, and model.lora_rank trains adapters. "
        "With a torchtune builder, a plain one trains all weights, lora_* trains adapters, and "
        "qlora_* trains adapters on a 4-bit base.",
        {"_component_": TRANSFORMERS},
    ),
    Key("model._component_", "text", "transformers, or a builder's dotted path.", TRANSFORMERS),
    Key(
        "model.adapter",
        "text",
        "What is trained instead of all weights: lora, dora, or the dotted path of an adapter of "
        "your own. Default: lora if lora_rank is set, or if the builder is torchtune's lora_*.",
    ),
    Key(
        "model.lora_modules",
        "texts",
        "Linear layers that get LoRA, by the last part of their names, such as q_proj; not for "
        "torchtune builders. Default: all linear layers of the blocks.",
    ),
    Key(
        "model.lora_attn_modules",
        "texts",
        "LoRA on q_proj, k_proj, v_proj, output_proj; for torchtune builders.",
    ),
    Key(
        "model.apply_lora_to_mlp",
        "flag",
        "Also LoRA on the MLP layers; for torchtune builders.",
        False,
    ),
    Key(
        "model.lora_rank",
        "positive",
        "LoRA rank: a higher rank learns more and needs more memory. Default: 8 for torchtune's "
        "lora_*, else no LoRA.",
    ),
    Key(
        "model.lora_alpha",
        "number",
        "LoRA updates are scaled by lora_alpha / lora_rank. Default: 16 for torchtune's lora_*, "
        "else twice the rank.",
    ),
    Key("model.lora_dropout", "rate", "Dropout on the input of LoRA layers.", 0.0),
    Key("model.use_dora", "flag", "DoRA: also train a magnitude per row.", False),
    Key(
        "model.quantize_base",
        "flag",
        "Keep the frozen base in 4 bits (NF4), as qlora_* does.",
        False,
    ),
    Key("tokenizer", "component", "Builder of the tokenizer, with its chat template.", REQUIRED),
    Key("tokenizer.path", "text", "Folder or file of the tokenizer."),
    Key(
        "tokenizer.max_seq_len",
        "positive",
        "Maximum sample length, or length of a packed row, in tokens. A longer sample is "
        "truncated; a plain text is split.",
    ),
    Key("checkpointer", "open block", "The model's folder.", REQUIRED),
    Key("checkpointer.checkpoint_dir", "text", "Folder of config.json and weights.", REQUIRED),
    Key("checkpointer.checkpoint_files", "any", "Weight files. Default: all *.safetensors in it."),
    Key("checkpointer.model_type", "text", "torchtune's name of the model family: LLAMA3."),
    Key("checkpointer.adapter_checkpoint", "text", "Adapter to start from (safetensors)."),
    Key("checkpointer.recipe_checkpoint", "text", "State of a torchtune run."),
    Key("checkpointer.output_dir", "text", "Folder for checkpoints."),
    Key("resume_from_checkpoint", "flag", "Continue a torchtune run.", False),
)
GROUPS["Data"] = (
    Key(
        "dataset",
        "component",
        "Builder of the dataset and its arguments; or prepared:NAME@SPLIT, from cookbook prepare.",
        REQUIRED,
    ),
    Key("dataset.data_dir", "text", "Folder of a split that cookbook prepare made."),
    Key("dataset.source", "text", "Dataset on the Hub; or json, csv, parquet, text."),
    Key("dataset.data_files", "any", "Your own files: /shared/my.jsonl, or a list."),
    Key("dataset.split", "text", "Split, or a part of one: train[:95%].", "train"),
    Key("dataset.train_on_input", "flag", "Also train on the prompt tokens.", False),
    Key("dataset.train_on", "all | last | marked", "Which answers of a conversation are trained."),
    Key("dataset.train_on_reasoning", "flag", "Train on the answers' reasoning. Default: true."),
    Key(
        "dataset.packed",
        "flag",
        "Pack whole samples into rows of tokenizer.max_seq_len tokens. Samples do not attend to "
        "each other; batch_size then counts rows.",
        False,
    ),
    Key("dataset.split_across_pack", "flag", "Fill rows by cutting samples.", False),
    Key(
        "dataset_val",
        "open block",
        "Validation dataset; keys that it does not set are those of dataset: "
        "dataset_val.split=test.",
    ),
    Key("data_cache_dir", "text", "Folder for tokenised data. Default: runs/.data_cache."),
    Key("shuffle", "flag", "Shuffle the samples in each epoch.", True),
    Key("seed", "count", "Seed of the order of samples, of dropout and of new adapters.", 0),
    Key("num_workers", "count", "Processes per rank that prefetch data. Default: 2 with GPUs."),
    Key(
        "collate_fn",
        "torchtune.data.padded_collate_sft | torchtune.data.padded_collate_packed",
        "How samples become a batch.",
    ),
)
GROUPS["Training"] = (
    Key(
        "batch_size",
        "positive",
        "Samples or packed rows per micro-step and GPU (per group of tensor-parallel GPUs).",
        REQUIRED,
    ),
    Key("batch_size_val", "positive", "The same for validation. Default: batch_size."),
    Key("gradient_accumulation_steps", "positive", "Micro-steps per optimizer step.", 1),
    Key("epochs", "positive", "Passes over the dataset.", 1),
    Key("max_steps", "positive", "Maximum number of optimizer steps."),
    Key("max_steps_per_epoch", "positive", "Maximum number of optimizer steps per epoch."),
    Key("optimizer", "component", "The optimizer and its arguments.", REQUIRED),
    Key("optimizer.lr", "rate", "Learning rate."),
    Key("optimizer.weight_decay", "rate", "Weight decay."),
    Key("optimizer.betas", "list", "Adam's decay rates: [0.9, 0.95]."),
    Key("optimizer.eps", "rate", "Adam's epsilon."),
    Key(
        "lr_scheduler",
        "component",
        "Learning rate schedule, stepped after each optimizer step. Default: a constant rate.",
    ),
    Key("lr_scheduler.num_warmup_steps", "count", "Warmup steps, in which the rate rises from 0."),
    Key(
        "loss",
        "component",
        "The loss; trainer.layers.loss.LinearCrossEntropy never materializes all logits.",
        {"_component_": "torch.nn.CrossEntropyLoss"},
    ),
    Key("router_aux_loss_coef", "rate", "Weight of the load-balancing loss of the experts.", 0.0),
    Key("train_router", "flag", "Train the router of the experts, in full fine-tuning.", True),
    Key("clip_grad_norm", "number", "Maximum gradient norm. Default: no clipping."),
    Key(
        "max_non_finite_steps", "positive", "Consecutive NaN or infinite steps that end the run.", 3
    ),
    Key("optimizer_in_bwd", "flag", "Step the optimizer during the backward pass.", False),
)
GROUPS["Memory and precision"] = (
    Key("device", "auto | cuda | cpu", "auto: GPUs if there are any, else CPUs.", "auto"),
    Key("dtype", "bf16 | fp32", "Data type of weights and computation.", "bf16"),
    Key("master_weights", "fp32", "Keep trained weights and optimizer state in fp32."),
    Key(
        "activation_checkpointing",
        "layers",
        "What the backward pass recomputes: none; full, every layer; n, every n-th layer; op, in "
        "each layer all but matrix products and attention. Default: none.",
    ),
    Key("enable_activation_checkpointing", "flag", "Same as activation_checkpointing=full.", False),
    Key(
        "ac_mode",
        "none | full | selective",
        "torchtune's form of activation_checkpointing; see ac_option.",
    ),
    Key("ac_option", "any", "With ac_mode=selective: op or n."),
    Key(
        "enable_activation_offloading",
        "flag",
        "Keep inputs of recomputed layers in CPU memory.",
        False,
    ),
    Key(
        "compile", "flag", "torch.compile each layer; the first step takes a minute longer.", False
    ),
    Key("enable_fp8_training", "flag", "Matrix products in fp8 (H100, L40S and later).", False),
    Key("fp8_recipe_name", "tensorwise | rowwise", "Scale per tensor or per row.", "tensorwise"),
    Key("low_cpu_ram", "flag", "Load the model with less CPU memory.", False),
)
GROUPS["Layout over GPUs"] = (
    Key("tensor_parallel_dim", "positive", "GPUs of a node that split each layer.", 1),
    Key(
        "expert_parallel_dim",
        "positive",
        "GPUs over which the experts of a layer are distributed.",
        1,
    ),
    Key("data_parallel_replicate_dim", "positive", "Data-parallel replicas (HSDP).", 1),
    Key(
        "data_parallel_shard_dim",
        "dimension",
        "GPUs over which FSDP shards each replica; -1: all remaining GPUs.",
        -1,
    ),
    Key(
        "sync_each_micro_batch",
        "flag",
        "Reduce gradients after each micro-step: more traffic, less memory. Default: true with "
        "fsdp_cpu_offload.",
    ),
    Key("custom_sharded_layers", "texts", "Layers to shard separately: tok_embeddings."),
    Key(
        "fsdp_cpu_offload",
        "flag",
        "Keep weights, gradients and optimizer state in CPU memory.",
        False,
    ),
    Key("fsdp", "block", "torchtune's older block."),
    Key("fsdp.cpu_offload", "flag", "Same as fsdp_cpu_offload.", False),
    Key("fsdp_reshard_after_forward", "flag", "Gather weights again for the backward pass.", True),
    Key("fsdp_prefetch", "count", "Blocks to prefetch. Default: FSDP's own choice."),
    Key("fsdp_reduce_dtype", "fp32 | bf16", "Data type of the gradient reduction.", "fp32"),
    Key("tensor_parallel_plan", "open block", "How tensor parallelism splits layers."),
    Key("memory_efficient_fsdp_wrap", "flag", "Shard embedding and output separately.", False),
)
GROUPS["Checkpoints and export"] = (
    Key("save_every_n_steps", "count", "Steps between checkpoints. Default: only at the end."),
    Key("save_every_minutes", "number", "Minutes between checkpoints."),
    Key("keep_last_n_checkpoints", "positive", "Newest checkpoints to keep.", 2),
    Key(
        "enable_async_checkpointing",
        "flag",
        "Continue training while a checkpoint is written.",
        False,
    ),
    Key(
        "export_checkpoint",
        "best | last",
        "Checkpoint to export; best: lowest validation loss. Default: best with dataset_val.",
    ),
    Key("save_adapter_weights_only", "flag", "Export the adapter, not the merged model.", False),
)
GROUPS["Logging and profiling"] = (
    Key("log_every_n_steps", "positive", "Steps between lines of metrics.", 1),
    Key("run_val_every_n_steps", "positive", "Steps between validations. Default: an epoch."),
    Key("cudnn_deterministic_mode", "count", "0 off, 1 warn, 2 fail, as torch's debug mode."),
    Key("generate", "block", "Prompts that the trained model answers."),
    Key("generate.prompts", "texts", "The prompts.", REQUIRED),
    Key("generate.max_new_tokens", "positive", "Maximum answer length in tokens.", 128),
    Key("profiler", "block", "torch.profiler. Option: --profile."),
    Key("profiler.enabled", "flag", "Record traces for TensorBoard.", False),
    Key("profiler.cpu", "flag", "Record operations on the CPU.", True),
    Key("profiler.cuda", "flag", "Record kernels on the GPU.", True),
    Key("profiler.profile_memory", "flag", "Record memory.", False),
    Key("profiler.with_stack", "flag", "Record Python's call stacks.", False),
    Key("profiler.record_shapes", "flag", "Record shapes of tensors.", True),
    Key("profiler.with_flops", "flag", "Count FLOPs.", False),
    Key("profiler.wait_steps", "count", "Steps before the warm-up of each cycle.", 5),
    Key("profiler.warmup_steps", "count", "Steps that are recorded and dropped.", 3),
    Key("profiler.active_steps", "positive", "Steps that are recorded and kept.", 2),
    Key("profiler.num_cycles", "count", "Number of cycles; 0: until the end.", 1),
    Key("profiler.steps", "steps", "First and last step to record, instead of cycles."),
    Key("profiler.ranks", "ranks", "Ranks to record. Default: the first of each node."),
    Key("profiler.memory_snapshot", "flag", "Record a snapshot for torch's memory viewer.", False),
    Key("profiler._component_", "text", "torchtune's profiler; torch.profiler is used."),
    Key("profiler.output_dir", "text", "Folder for traces."),
    Key("profiler.xpu", "flag", "Record Intel GPUs.", False),
    Key("metric_logger", "open block", "torchtune's logger."),
    Key("log_peak_memory_stats", "flag", "Log peak memory.", False),
)

# Accepted because torchtune's configs hold them; they change nothing here, and why.
_UNUSED = {
    "checkpointer.output_dir": "checkpoints go to the run's directory",
    "collate_fn": "the trainer makes batches by itself, with the same result",
    "dataset.split_across_pack": "samples are packed whole; only a plain text longer than a row "
    "is split",
    "log_peak_memory_stats": "peak memory is always logged",
    "low_cpu_ram": "weights are always read tensor by tensor",
    "memory_efficient_fsdp_wrap": "each block is sharded separately; see custom_sharded_layers",
    "metric_logger": "metrics go to metrics.jsonl and TensorBoard",
    "optimizer_in_bwd": "the optimizer steps after the backward pass",
    "profiler.output_dir": "traces go to the run's directory",
    "profiler.xpu": "Intel GPUs are not supported",
    "tensor_parallel_plan": "the trainer uses its own plan",
}
# They would change the result and cannot be followed; what to do instead.
_REFUSED = {
    "checkpointer.recipe_checkpoint": "the trainer cannot read the state of a torchtune run; "
    "start from its weights with checkpointer.checkpoint_dir, or from its adapter with "
    "checkpointer.adapter_checkpoint",
    "resume_from_checkpoint": "a run resumes automatically after a fault; resume an ended run "
    "with cookbook resume RUN; to start from an adapter set checkpointer.adapter_checkpoint",
}
# Keys that may change when a run resumes; a block stands for its keys.
_MAY_CHANGE = """
    checkpointer.checkpoint_dir checkpointer.checkpoint_files checkpointer.model_type
    dataset_val batch_size_val data_cache_dir num_workers
    epochs max_steps clip_grad_norm max_non_finite_steps
    optimizer.lr optimizer.weight_decay optimizer.betas optimizer.eps lr_scheduler
    device activation_checkpointing enable_activation_checkpointing ac_mode ac_option
    enable_activation_offloading compile
    tensor_parallel_dim expert_parallel_dim data_parallel_replicate_dim data_parallel_shard_dim
    sync_each_micro_batch
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


def with_train_on_input(block: Any, value: bool) -> Any:
    """Return a dataset block with train_on_input set, if torchtune has another default for it."""
    open_choice = isinstance(block, dict) and block.get("train_on_input") is None
    if open_choice and block.get("_component_") in TRAINS_PROMPTS:
        return {**block, "train_on_input": value}
    return block


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


def uncompiled_experts(config: Mapping[str, Any]) -> bool:
    """Whether blocks with experts stay uncompiled, although `compile` is set.

    The exchange of tokens between ranks ends a compiled graph, and "op" needs a whole one.
    """
    ranks = config.get("expert_parallel_dim")
    spread = isinstance(ranks, int) and ranks > 1
    return config.get("compile") is True and spread and recomputed(config) == "op"


def notes(config: Mapping[str, Any]) -> Iterator[str]:
    """One line for each key that does something else than one may expect of it."""
    for name in ("dataset", "dataset_val"):
        block = config.get(name)
        if not isinstance(block, dict):
            continue
        if block.get("train_on_input") is True:
            yield (
                f"{name}.train_on_input: true, so the prompts are also trained; set "
                f"{name}.train_on_input=False to train the answers only"
            )
        elif with_train_on_input(block, False) is not block:
            yield (
                f"{name}.train_on_input: not set, so only the answers are trained; torchtune's "
                f"{block['_component_'].rpartition('.')[2]} would also train the prompts: "
                f"{name}.train_on_input=True"
            )
    saved, validated = config.get("save_every_n_steps"), config.get("run_val_every_n_steps")
    if isinstance(saved, int) and isinstance(validated, int) and validated and saved % validated:
        yield (
            "save_every_n_steps: only a checkpoint at a multiple of run_val_every_n_steps has a "
            "val_loss and can be the best"
        )
    if config.get("enable_fp8_training") and not config.get("compile"):
        yield (
            "enable_fp8_training: without compile its casts cost more time than its matrix "
            "products save; set compile=True"
        )
    if uncompiled_experts(config):
        yield (
            "compile: blocks with experts are not compiled with expert_parallel_dim above 1 and "
            "activation_checkpointing=op; with full, a number or none they are"
        )
