"""train.yaml: which keys exist, what each may hold, and how a component is made from one."""

import difflib
import importlib
import inspect
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError

COMPONENT_PREFIXES = (
    "torch.",
    "torchtune.",
    "torchao.",
    "trainer.",
    "transformers.",
    "bitsandbytes.",
)
PROFILER_KEYS = {
    "_component_": None,
    "enabled": False,
    "output_dir": None,
    "cpu": True,
    "cuda": True,
    "xpu": False,
    "profile_memory": False,
    "with_stack": False,
    "record_shapes": True,
    "with_flops": False,
    "wait_steps": 5,
    "warmup_steps": 3,
    "active_steps": 2,
    "num_cycles": 1,
}
REQUIRED = object()

# key: (kind, default). A kind ending in "?" may be null.
USED_KEYS: dict[str, tuple[str, Any]] = {
    "output_dir": ("text", REQUIRED),
    "seed": ("count?", None),
    "shuffle": ("flag", True),
    "device": ("text", "auto"),
    "dtype": ("text", "bf16"),
    "model": ("component", REQUIRED),
    "tokenizer": ("component", REQUIRED),
    "checkpointer": ("block", REQUIRED),
    "dataset": ("component", REQUIRED),
    "batch_size": ("positive", REQUIRED),
    "epochs": ("positive", 1),
    "max_steps_per_epoch": ("positive?", None),
    "max_steps": ("positive?", None),
    "gradient_accumulation_steps": ("positive", 1),
    "clip_grad_norm": ("number?", None),
    "optimizer": ("component", REQUIRED),
    "lr_scheduler": ("component?", None),
    "loss": ("component", {"_component_": "torch.nn.CrossEntropyLoss"}),
    "enable_activation_checkpointing": ("flag", False),
    "enable_activation_offloading": ("flag", False),
    "compile": ("flag", False),
    "log_every_n_steps": ("positive", 1),
    "profiler": ("block?", None),
    "save_every_n_steps": ("count?", None),
    "keep_last_n_checkpoints": ("positive", 2),
    "save_adapter_weights_only": ("flag", False),
    "generate": ("block?", None),
    "tensor_parallel_dim": ("positive?", None),
    "custom_sharded_layers": ("list?", None),
    "fsdp_reshard_after_forward": ("flag", True),
    "cudnn_deterministic_mode": ("count?", None),
}
# Accepted because stock configs hold them; each either changes nothing here or is refused below
# for the values that would change the result.
OTHER_KEYS = (
    "ac_mode",
    "ac_option",
    "collate_fn",
    "data_parallel_replicate_dim",
    "data_parallel_shard_dim",
    "enable_async_checkpointing",
    "fsdp",
    "fsdp_cpu_offload",
    "log_peak_memory_stats",
    "low_cpu_ram",
    "memory_efficient_fsdp_wrap",
    "metric_logger",
    "optimizer_in_bwd",
    "resume_from_checkpoint",
    "tensor_parallel_plan",
)
TOP_LEVEL_KEYS = tuple(sorted((*USED_KEYS, *OTHER_KEYS)))


@dataclass(frozen=True)
class TrainConfig:
    """A checked train.yaml: every used key is an attribute; `notes` tell what was set aside."""

    output_dir: Path
    seed: int
    shuffle: bool
    device: str
    dtype: str
    model: dict[str, Any]
    tokenizer: dict[str, Any]
    checkpointer: dict[str, Any]
    dataset: dict[str, Any]
    batch_size: int
    epochs: int
    max_steps_per_epoch: int | None
    max_steps: int | None
    gradient_accumulation_steps: int
    clip_grad_norm: float | None
    optimizer: dict[str, Any]
    lr_scheduler: dict[str, Any] | None
    loss: dict[str, Any]
    enable_activation_checkpointing: bool
    enable_activation_offloading: bool
    compile: bool
    log_every_n_steps: int
    profiler: dict[str, Any] | None
    save_every_n_steps: int | None
    keep_last_n_checkpoints: int
    save_adapter_weights_only: bool
    generate: dict[str, Any] | None
    tensor_parallel_dim: int
    custom_sharded_layers: list[str] | None
    fsdp_reshard_after_forward: bool
    cudnn_deterministic_mode: int | None
    notes: tuple[str, ...]

    @property
    def model_folder(self) -> Path:
        """The Hugging Face folder that the weights come from."""
        return Path(self.checkpointer["checkpoint_dir"])


def load(path: Path) -> TrainConfig:
    """Read and check `path`.

    Raises:
        ConfigError: the file cannot be read, or values are wrong; names all faults at once.
    """
    return parse(read_yaml(path))


def read_yaml(path: Path) -> dict[str, Any]:
    """The resolved content of a YAML file; raises ConfigError with line and column."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the run's train.yaml") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = getattr(error, "problem", None) or "not YAML"
        raise ConfigError(f"{path}{where}: {reason}") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold keys and values, found {type(content).__name__}")
    return {str(key): value for key, value in content.items()}


def unknown_key_faults(keys: dict[str, Any]) -> list[str]:
    """A fault for each key that no config may hold, naming the nearest known one."""
    faults = []
    for key in keys:
        if key not in TOP_LEVEL_KEYS:
            near = difflib.get_close_matches(key, TOP_LEVEL_KEYS, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            faults.append(f"{key}: the sft trainer knows no such key{hint}")
    return faults


def parse(content: dict[str, Any]) -> TrainConfig:
    """Check a resolved config; raises ConfigError with all faults at once."""
    faults = unknown_key_faults(content)
    values: dict[str, Any] = {}
    for key, (kind, default) in USED_KEYS.items():
        value = content.get(key, default)
        if value is REQUIRED:
            faults.append(f"{key}: is missing")
            continue
        try:
            values[key] = _checked(key, kind, value)
        except ConfigError as error:
            faults.extend(error.faults)
    for key, standard in (("seed", 0), ("tensor_parallel_dim", 1)):
        if values.get(key) is None:
            values[key] = standard
    faults += _block_faults(values) + _not_there_yet(content, values)
    if faults:
        raise ConfigError(*faults)
    values["output_dir"] = Path(values["output_dir"]).absolute()
    return TrainConfig(**values, notes=tuple(_notes(content)))


def _checked(key: str, kind: str, value: Any) -> Any:
    if value is None:
        if kind.endswith("?"):
            return None
        raise ConfigError(f"{key}: is empty")
    kind = kind.rstrip("?")
    whole = isinstance(value, int) and not isinstance(value, bool)
    if kind == "number":
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if math.isnan(number) or number <= 0:
            raise ConfigError(f"{key}: must be a number above 0, found {value!r}")
        return number
    if kind == "component":
        return _checked_component(key, value)
    allowed, meaning = {
        "text": (isinstance(value, str) and bool(value), "text"),
        "flag": (isinstance(value, bool), "True or False"),
        "positive": (whole and value >= 1, "a whole number from 1 on"),
        "count": (whole and value >= 0, "a whole number from 0 on"),
        "block": (isinstance(value, dict), "a block of keys"),
        "list": (isinstance(value, list), "a list"),
    }[kind]
    if not allowed:
        raise ConfigError(f"{key}: must be {meaning}, found {value!r}")
    return value


def _checked_component(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("_component_"), str):
        raise ConfigError(f"{key}: must be a block with a _component_")
    if not value["_component_"].startswith(COMPONENT_PREFIXES):
        raise ConfigError(
            f"{key}._component_: {value['_component_']!r} is not allowed; "
            f"it must begin with one of {', '.join(COMPONENT_PREFIXES)}"
        )
    return value


def _block_faults(values: dict[str, Any]) -> list[str]:
    faults = []
    for key, choices in (("device", ("auto", "cuda", "cpu")), ("dtype", ("bf16", "fp32"))):
        if key in values and values[key] not in choices:
            faults.append(f"{key}: must be one of {', '.join(choices)}, found {values[key]!r}")
    folder = (values.get("checkpointer") or {}).get("checkpoint_dir")
    if "checkpointer" in values and not isinstance(folder, str):
        faults.append("checkpointer.checkpoint_dir: must name the model's folder")
    for key in values.get("profiler") or {}:
        if key not in PROFILER_KEYS:
            faults.append(f"profiler.{key}: no such key; known: {', '.join(PROFILER_KEYS)}")
    generate = values.get("generate")
    if generate is not None:
        prompts = generate.get("prompts")
        if not isinstance(prompts, list) or not all(isinstance(p, str) for p in prompts):
            faults.append("generate.prompts: must be a list of questions")
        limit = generate.get("max_new_tokens", 128)
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            faults.append("generate.max_new_tokens: must be a whole number from 1 on")
        for key in set(generate) - {"prompts", "max_new_tokens"}:
            faults.append(f"generate.{key}: no such key; known: prompts, max_new_tokens")
        if values.get("save_adapter_weights_only"):
            faults.append("generate: needs the merged model; set save_adapter_weights_only=False")
    return faults


def _block(content: dict[str, Any], key: str) -> dict[str, Any]:
    value = content.get(key)
    return value if isinstance(value, dict) else {}


def _not_there_yet(content: dict[str, Any], values: dict[str, Any]) -> list[str]:
    """A fault for each value that asks for what this trainer does not do."""
    faults = []
    model = values.get("model") or {}
    offload = content.get("fsdp_cpu_offload") or _block(content, "fsdp").get("cpu_offload")
    refusals = (
        (
            values["tensor_parallel_dim"] > 1 and values.get("compile"),
            "compile: does not work with tensor_parallel_dim above 1; set compile=False",
        ),
        (
            values["tensor_parallel_dim"] > 1 and values.get("enable_activation_offloading"),
            "enable_activation_offloading: does not work with tensor_parallel_dim above 1; "
            "set enable_activation_offloading=False",
        ),
        (
            content.get("data_parallel_replicate_dim") not in (None, 1),
            "data_parallel_replicate_dim: only 1 is supported; FSDP shards over all GPUs",
        ),
        (
            content.get("data_parallel_shard_dim") not in (None, -1),
            "data_parallel_shard_dim: only -1 (all GPUs) is supported",
        ),
        (offload, "fsdp_cpu_offload: is not supported; set it to False and use more GPUs"),
        (
            content.get("ac_mode") not in (None, "full"),
            "ac_mode: selective activation checkpointing is not supported; "
            "remove ac_mode and use enable_activation_checkpointing=True",
        ),
        (
            (values.get("dataset") or {}).get("packed"),
            "dataset.packed: packing is not supported; set dataset.packed=False",
        ),
        (
            content.get("collate_fn") not in (None, "torchtune.data.padded_collate_sft"),
            "collate_fn: only torchtune.data.padded_collate_sft is supported",
        ),
        (
            model.get("quantize_base") or "qlora" in str(model.get("_component_")),
            "model: QLoRA (quantize_base) is not supported; use the LoRA builder",
        ),
        (model.get("use_dora"), "model.use_dora: DoRA is not supported; set model.use_dora=False"),
        (
            values.get("enable_activation_offloading")
            and not values.get("enable_activation_checkpointing"),
            "enable_activation_offloading: needs enable_activation_checkpointing=True",
        ),
    )
    for refused, fault in refusals:
        if refused:
            faults.append(fault)
    return faults


def _notes(content: dict[str, Any]) -> list[str]:
    """One line for each key that was read and set aside, because the result is the same."""
    notes = []
    if content.get("optimizer_in_bwd"):
        notes.append("optimizer_in_bwd: set aside; the optimizer steps after the backward pass")
    if content.get("enable_async_checkpointing"):
        notes.append("enable_async_checkpointing: set aside; checkpoints are written in step")
    if content.get("tensor_parallel_plan"):
        notes.append("tensor_parallel_plan: set aside; the trainer has a plan of its own")
    if content.get("memory_efficient_fsdp_wrap"):
        notes.append("memory_efficient_fsdp_wrap: set aside; each block is sharded by itself")
    logger = str(_block(content, "metric_logger").get("_component_", ""))
    if logger and not logger.endswith(("DiskLogger", "StdoutLogger", "TensorBoardLogger")):
        notes.append(f"metric_logger: {logger} set aside; see metrics.jsonl and tensorboard/")
    return notes


def instantiate(key: str, block: dict[str, Any], *args: Any, **extra: Any) -> Any:
    """Call the component that a block names with the block's other keys.

    Raises:
        ConfigError: the component does not exist, or does not take these arguments.
    """
    dotted, component = block.get("_component_"), _component(key, block)
    arguments = {k: v for k, v in block.items() if k != "_component_"} | extra
    try:
        return component(*args, **arguments)
    except (TypeError, ValueError, FileNotFoundError, AssertionError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{key}: {dotted} refused its arguments: {reason}") from error


def arguments_of(key: str, block: dict[str, Any]) -> set[str]:
    """The names of what the component that a block names can be told."""
    return set(inspect.signature(_component(key, block)).parameters)


def _component(key: str, block: dict[str, Any]) -> Any:
    dotted = _checked_component(key, block)["_component_"]
    module_name, _, name = dotted.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), name)
    except ImportError as error:
        raise ConfigError(f"{key}._component_: {dotted} cannot be imported: {error}") from None
    except AttributeError:
        names = [n for n in dir(importlib.import_module(module_name)) if not n.startswith("_")]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{key}._component_: {module_name} has no {name}{hint}") from None
