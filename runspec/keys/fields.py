"""The keys that all training methods of the kit share, in groups.

Each is a field: its type, its kind, a line of help, its default. It has torchtune's name if
torchtune has the key.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runspec.keys.key import REQUIRED, Key, changeable, setting

# dataset._component_ of a mixture of sources that is read while it is trained.
STREAM = "trainer.data.stream.stream_dataset"
# dataset.source of files, as datasets.load_dataset takes it; any other names a dataset or a folder.
FILE_SOURCES = ("json", "csv", "parquet", "text", "arrow")


def names_no_files(dataset: Mapping[str, Any]) -> str | None:
    """Why a dataset block cannot be read: it is of files, and names none; else None.

    datasets.load_dataset would then read any files of the working directory.
    """
    source = dataset.get("source")
    if source not in FILE_SOURCES or dataset.get("data_files") or dataset.get("data_dir"):
        return None
    return f"data_files must name the files of source {source}"


@dataclass(frozen=True, kw_only=True)
class DataKeys:
    """Data."""

    dataset: dict[str, Any] = setting(
        "component",
        "Builder of the dataset and its arguments; or prepared:NAME@SPLIT, from cookbook prepare.",
        REQUIRED,
        inner=(
            Key("data_dir", "text", "Folder of a split that cookbook prepare made."),
            Key("source", "text", "Dataset on the Hub; or json, csv, parquet, text."),
            Key("data_files", "any", "Your own files: /shared/my.jsonl, or a list."),
            Key("split", "text", "Split, or a part of one: train[:95%].", "train"),
            Key("train_on_input", "flag", "Also train on the prompt tokens.", False),
            Key("train_on", "all | last", "Which answers of a conversation are trained."),
            Key(
                "packed",
                "flag",
                "Pack whole samples into rows of tokenizer.max_seq_len tokens. Samples do not "
                "attend to each other; batch_size then counts rows.",
                False,
            ),
            Key(
                "split_across_pack",
                "flag",
                "Fill rows by cutting samples.",
                False,
                unused=("samples are packed whole; only a plain text longer than a row is split"),
            ),
        ),
    )
    dataset_val: dict[str, Any] | None = changeable(
        "open block",
        "Validation dataset; keys that it does not set are those of dataset: "
        "dataset_val.split=test.",
    )
    data_cache_dir: str | None = changeable(
        "text", "Folder for tokenised data. Default: runs/.data_cache."
    )
    shuffle: bool = setting("flag", "Shuffle the samples in each epoch.", True)
    num_workers: int | None = changeable(
        "count", "Processes per rank that prefetch data. Default: 2 with GPUs."
    )


@dataclass(frozen=True, kw_only=True)
class TrainingKeys:
    """Training."""

    batch_size: int = setting(
        "positive",
        "Samples or packed rows per micro-step and GPU (per group of tensor-parallel GPUs).",
        REQUIRED,
    )
    batch_size_val: int | None = changeable(
        "positive", "The same for validation. Default: batch_size."
    )
    gradient_accumulation_steps: int = setting("positive", "Micro-steps per optimizer step.", 1)
    epochs: int = changeable("positive", "Passes over the dataset.", 1)
    max_steps: int | None = changeable("positive", "Maximum number of optimizer steps.")
    max_steps_per_epoch: int | None = setting(
        "positive", "Maximum number of optimizer steps per epoch."
    )
    optimizer: dict[str, Any] = setting(
        "component",
        "The optimizer and its arguments.",
        REQUIRED,
        inner=(
            Key("lr", "rate", "Learning rate.", nullable=False, may_change=True),
            Key("weight_decay", "rate", "Weight decay.", nullable=False, may_change=True),
            Key(
                "betas", "list", "Adam's decay rates: [0.9, 0.95].", nullable=False, may_change=True
            ),
            Key("eps", "rate", "Adam's epsilon.", nullable=False, may_change=True),
            Key(
                "no_weight_decay",
                "texts",
                "What has no weight decay: norm, bias, embedding (and output head), or patterns of "
                "names.",
                may_change=True,
            ),
        ),
    )
    lr_scheduler: dict[str, Any] | None = changeable(
        "component",
        "Learning rate schedule, stepped after each optimizer step. Default: a constant rate.",
        inner=(
            Key(
                "num_warmup_steps",
                "count",
                "Warmup steps, in which the rate rises from 0.",
                nullable=False,
            ),
            Key("warmup_ratio", "rate", "The same as a share of all steps, such as 0.03."),
            Key("decay_ratio", "rate", "Share of all steps in which get_wsd_schedule falls."),
        ),
    )
    clip_grad_norm: float | None = changeable(
        "number", "Maximum gradient norm. Default: no clipping."
    )
    max_non_finite_steps: int = changeable(
        "positive", "Consecutive NaN or infinite steps that end the run.", 3
    )


@dataclass(frozen=True, kw_only=True)
class PrecisionKeys:
    """Memory and precision."""

    device: str = changeable(
        "auto | cuda | cpu",
        "auto: GPUs if there are any, else CPUs; GPUs that torch cannot use are an error.",
        "auto",
    )
    dtype: str = setting("bf16 | fp32", "Data type of weights and computation.", "bf16")
    master_weights: str | None = setting(
        "fp32", "Keep trained weights and optimizer state in fp32."
    )
    activation_checkpointing: int | str | None = changeable(
        "layers",
        "What the backward pass recomputes: none; full, every layer; n, every n-th layer; op, "
        "in each layer all but matrix products and attention. Default: none.",
    )
    enable_activation_offloading: bool = changeable(
        "flag", "Keep inputs of recomputed layers in CPU memory.", False
    )
    compile: bool = changeable(
        "flag",
        "torch.compile each layer; the first step takes a minute longer.",
        False,
    )
    flash_attention: str | None = changeable(
        "FA3 | FA4",
        "FlashAttention 3 (H100; the package flash_attn_interface) or 4 (H100, B200; flash-attn-4) "
        "in the place of torch's own FlashAttention 2.",
    )
    enable_fp8_training: bool = setting(
        "flag", "Matrix products in fp8 (H100, L40S and later), in full fine-tuning.", False
    )
    fp8_recipe_name: str = setting(
        "tensorwise | rowwise", "Scale per tensor or per row.", "tensorwise"
    )


@dataclass(frozen=True, kw_only=True)
class LayoutKeys:
    """Layout over GPUs."""

    tensor_parallel_dim: int = changeable("positive", "GPUs of a node that split each layer.", 1)
    expert_parallel_dim: int = changeable(
        "positive", "GPUs over which the experts of a layer are distributed.", 1
    )
    data_parallel_replicate_dim: int = changeable(
        "dimension",
        "Data-parallel replicas (HSDP); -1: each GPU, or tensor-parallel group, has a whole model. "
        "With an adapter FSDP then gathers nothing, and only the adapter's gradients are sent.",
        1,
    )
    data_parallel_shard_dim: int = changeable(
        "dimension",
        "GPUs over which FSDP shards each replica; -1: all remaining GPUs.",
        -1,
    )
    sync_each_micro_batch: bool | None = changeable(
        "flag",
        "Reduce gradients after each micro-step: more traffic, less memory. Default: true with "
        "fsdp_cpu_offload.",
    )
    fsdp_cpu_offload: bool = changeable(
        "flag", "Keep weights, gradients and optimizer state in CPU memory.", False
    )
    fsdp_reshard_after_forward: bool = changeable(
        "flag", "Gather weights again for the backward pass.", True
    )
    fsdp_prefetch: int | None = changeable(
        "count", "Blocks to prefetch. Default: FSDP's own choice."
    )
    fsdp_reduce_dtype: str = setting("fp32 | bf16", "Data type of the gradient reduction.", "fp32")


@dataclass(frozen=True, kw_only=True)
class CheckpointKeys:
    """Checkpoints and export."""

    save_every_n_steps: int | None = changeable(
        "count", "Steps between checkpoints. Default: only at the end."
    )
    save_every_minutes: float | None = changeable("number", "Minutes between checkpoints.")
    keep_last_n_checkpoints: int = changeable(
        "positive", "Newest checkpoints to keep, beside the best.", 2
    )
    enable_async_checkpointing: bool = changeable(
        "flag", "Continue training while a checkpoint is written.", False
    )
    export_checkpoint: str | None = changeable(
        "best | last",
        "Checkpoint to export; best: lowest validation loss, saved when it is measured. Default: "
        "best with dataset_val.",
    )


@dataclass(frozen=True, kw_only=True)
class LoggingKeys:
    """Logging and profiling."""

    log_every_n_steps: int = changeable("positive", "Steps between lines of metrics.", 1)
    run_val_every_n_steps: int | None = changeable(
        "positive", "Steps between validations. Default: an epoch."
    )
    cudnn_deterministic_mode: int | None = changeable(
        "count", "0 off, 1 warn, 2 fail, as torch's debug mode."
    )
    profiler: dict[str, Any] | None = changeable(
        "block",
        "torch.profiler. Option: --profile.",
        inner=(
            Key("enabled", "flag", "Record traces for TensorBoard.", False),
            Key("cpu", "flag", "Record operations on the CPU.", True),
            Key("cuda", "flag", "Record kernels on the GPU.", True),
            Key("profile_memory", "flag", "Record memory.", False),
            Key("with_stack", "flag", "Record Python's call stacks.", False),
            Key("record_shapes", "flag", "Record shapes of tensors.", True),
            Key("with_flops", "flag", "Count FLOPs.", False),
            Key("wait_steps", "count", "Steps before the warm-up of each cycle.", 5),
            Key("warmup_steps", "count", "Steps that are recorded and dropped.", 3),
            Key("active_steps", "positive", "Steps that are recorded and kept.", 2),
            Key("num_cycles", "count", "Number of cycles; 0: until the end.", 1),
            Key("ranks", "ranks", "Ranks to record. Default: the first of each node."),
            Key("_component_", "text", "torchtune's profiler; torch.profiler is used."),
            Key(
                "output_dir",
                "text",
                "Folder for traces.",
                unused="traces go to the run's directory",
            ),
            Key("xpu", "flag", "Record Intel GPUs.", False, unused="Intel GPUs are not supported"),
        ),
    )
