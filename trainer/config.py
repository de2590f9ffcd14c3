"""train.yaml: which keys exist, what each may hold, and how a component is made from one."""

import difflib
import importlib
import inspect
import math
import re
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
    "ranks": None,
    "steps": None,
    "memory_snapshot": False,
}
# How fp8 scales, the default first, and what its products take as rows: see trainer/fp8.py.
FP8_RECIPES, FP8_MULTIPLE = ("tensorwise", "rowwise"), 16
# The trainer collates by itself, with the results that these are meant to have.
COLLATE_FNS = ("torchtune.data.padded_collate_sft", "torchtune.data.padded_collate_packed")
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
    "dataset_val": ("block?", None),
    "data_cache_dir": ("text?", None),
    "num_workers": ("count?", None),
    "batch_size": ("positive", REQUIRED),
    "batch_size_val": ("positive?", None),
    "epochs": ("positive", 1),
    "max_steps_per_epoch": ("positive?", None),
    "max_steps": ("positive?", None),
    "gradient_accumulation_steps": ("positive", 1),
    "clip_grad_norm": ("number?", None),
    "max_non_finite_steps": ("positive", 3),
    "optimizer": ("component", REQUIRED),
    "lr_scheduler": ("component?", None),
    "loss": ("component", {"_component_": "torch.nn.CrossEntropyLoss"}),
    "master_weights": ("text?", None),
    "enable_activation_checkpointing": ("flag", False),
    "ac_mode": ("text?", None),
    "ac_option": ("any?", None),
    "enable_activation_offloading": ("flag", False),
    "compile": ("flag", False),
    "enable_fp8_training": ("flag", False),
    "fp8_recipe_name": ("text?", None),
    "log_every_n_steps": ("positive", 1),
    "profiler": ("block?", None),
    "run_val_every_n_steps": ("positive?", None),
    "save_every_n_steps": ("count?", None),
    "save_every_minutes": ("number?", None),
    "keep_last_n_checkpoints": ("positive", 2),
    "enable_async_checkpointing": ("flag", False),
    "export_checkpoint": ("text?", None),
    "save_adapter_weights_only": ("flag", False),
    "generate": ("block?", None),
    "sync_each_micro_batch": ("flag?", None),
    "tensor_parallel_dim": ("positive?", None),
    "data_parallel_replicate_dim": ("positive?", None),
    "data_parallel_shard_dim": ("dimension?", None),
    "fsdp_cpu_offload": ("flag", False),
    "custom_sharded_layers": ("list?", None),
    "fsdp_reshard_after_forward": ("flag", True),
    "fsdp_prefetch": ("count?", None),
    "fsdp_reduce_dtype": ("text?", None),
    "cudnn_deterministic_mode": ("count?", None),
}
# Accepted because stock configs hold them; each either changes nothing here or is refused below
# for the values that would change the result.
OTHER_KEYS = (
    "collate_fn",
    "fsdp",
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
    dataset_val: dict[str, Any] | None
    data_cache_dir: str | None
    num_workers: int | None
    batch_size: int
    batch_size_val: int
    epochs: int
    max_steps_per_epoch: int | None
    max_steps: int | None
    gradient_accumulation_steps: int
    clip_grad_norm: float | None
    max_non_finite_steps: int
    optimizer: dict[str, Any]
    lr_scheduler: dict[str, Any] | None
    loss: dict[str, Any]
    master_weights: str | None
    enable_activation_checkpointing: bool
    ac_mode: str | None
    ac_option: int | str | None
    enable_activation_offloading: bool
    compile: bool
    enable_fp8_training: bool
    fp8_recipe_name: str | None
    log_every_n_steps: int
    profiler: dict[str, Any] | None
    run_val_every_n_steps: int | None
    save_every_n_steps: int | None
    save_every_minutes: float | None
    keep_last_n_checkpoints: int
    enable_async_checkpointing: bool
    export_checkpoint: str | None
    save_adapter_weights_only: bool
    generate: dict[str, Any] | None
    sync_each_micro_batch: bool
    tensor_parallel_dim: int
    data_parallel_replicate_dim: int
    data_parallel_shard_dim: int
    fsdp_cpu_offload: bool
    custom_sharded_layers: list[str] | None
    fsdp_reshard_after_forward: bool
    fsdp_prefetch: int | None
    fsdp_reduce_dtype: str | None
    cudnn_deterministic_mode: int | None
    notes: tuple[str, ...]

    @property
    def model_folder(self) -> Path:
        """The Hugging Face folder that the weights come from."""
        return Path(self.checkpointer["checkpoint_dir"])

    @property
    def activation_checkpointing(self) -> int | str | None:
        """n: every n-th layer is recomputed; "op": all but matrix products and attention; or None.

        As in torchtune, `ac_mode` decides where it is given.
        """
        if self.ac_mode == "selective":
            return "op" if self.ac_option == "op" else int(self.ac_option)
        return 1 if self.ac_mode == "full" or self.enable_activation_checkpointing else None

    @property
    def fp8_recipe(self) -> str | None:
        """How the blocks' products are scaled in fp8; None without it."""
        return (self.fp8_recipe_name or FP8_RECIPES[0]) if self.enable_fp8_training else None

    @property
    def row_multiple(self) -> int:
        """What the length of every row must be divisible by, for tensor parallelism and fp8."""
        return math.lcm(self.tensor_parallel_dim, FP8_MULTIPLE if self.enable_fp8_training else 1)

    @property
    def data_cache(self) -> Path:
        """The folder of tokenised datasets; beside the run directories where none is named."""
        if self.data_cache_dir is None:
            return self.output_dir.parent / ".data_cache"
        return Path(self.data_cache_dir).expanduser().absolute()


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
    standards = {
        "seed": 0,
        "tensor_parallel_dim": 1,
        "data_parallel_replicate_dim": 1,
        "data_parallel_shard_dim": -1,
    }
    for key, standard in standards.items():
        if values.get(key) is None:
            values[key] = standard
    if _block(content, "fsdp").get("cpu_offload"):
        values["fsdp_cpu_offload"] = True
    # Without it each GPU keeps a whole copy's gradients, which is what offloading is to save.
    if values.get("sync_each_micro_batch") is None:
        values["sync_each_micro_batch"] = values.get("fsdp_cpu_offload", False)
    values["dataset_val"] = _inherited(values.get("dataset"), values.get("dataset_val"))
    if values.get("batch_size_val") is None:
        values["batch_size_val"] = values.get("batch_size")
    faults += _data_faults(values) + _block_faults(values) + _memory_faults(values)
    if content.get("collate_fn") not in (None, *COLLATE_FNS):
        faults.append(f"collate_fn: only {' and '.join(COLLATE_FNS)} are supported")
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
        "dimension": (whole and (value >= 1 or value == -1), "a whole number from 1 on, or -1"),
        "any": (True, "anything"),
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


def _inherited(
    dataset: dict[str, Any] | None, validation: dict[str, Any] | None
) -> dict[str, Any] | None:
    """dataset_val with the keys that it leaves out; another component has keys of its own."""
    if validation is None or dataset is None:
        return validation
    if validation.get("_component_", dataset["_component_"]) != dataset["_component_"]:
        return validation
    return {**dataset, **validation}


def _data_faults(values: dict[str, Any]) -> list[str]:
    faults = []
    validation = values.get("dataset_val")
    if validation is not None:
        try:
            _checked_component("dataset_val", validation)
        except ConfigError as error:
            faults.extend(error.faults)
    elif values.get("run_val_every_n_steps"):
        faults.append(
            "run_val_every_n_steps: needs dataset_val, such as dataset_val.split=train[95%:]"
        )
    length = (values.get("tokenizer") or {}).get("max_seq_len")
    for key in ("dataset", "dataset_val"):
        packed = (values.get(key) or {}).get("packed")
        if packed and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
            faults.append(f"{key}.packed: set tokenizer.max_seq_len, the length of a packed row")
    return faults


def _block_faults(values: dict[str, Any]) -> list[str]:
    faults = []
    for key, choices in (("device", ("auto", "cuda", "cpu")), ("dtype", ("bf16", "fp32"))):
        if key in values and values[key] not in choices:
            faults.append(f"{key}: must be one of {', '.join(choices)}, found {values[key]!r}")
    if values.get("export_checkpoint") not in (None, "best", "last"):
        found = values["export_checkpoint"]
        faults.append(f"export_checkpoint: must be one of best, last, found {found!r}")
    if values.get("export_checkpoint") == "best" and not values.get("dataset_val"):
        faults.append("export_checkpoint: best needs dataset_val, such as dataset_val.split=...")
    folder = (values.get("checkpointer") or {}).get("checkpoint_dir")
    if "checkpointer" in values and not isinstance(folder, str):
        faults.append("checkpointer.checkpoint_dir: must name the model's folder")
    faults += _profiler_faults(values.get("profiler") or {})
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


def _profiler_faults(block: dict[str, Any]) -> list[str]:
    def counts(value: Any, lowest: int) -> bool:
        return isinstance(value, list) and all(type(v) is int and v >= lowest for v in value)

    faults = []
    for key, value in block.items():
        if key not in PROFILER_KEYS:
            faults.append(f"profiler.{key}: no such key; known: {', '.join(PROFILER_KEYS)}")
        elif key == "ranks" and value not in (None, "all") and not (value and counts(value, 0)):
            faults.append(
                f"profiler.ranks: must be all or a list of ranks such as [0, 8], found {value!r}"
            )
        elif key == "steps" and value is not None:
            if not (counts(value, 1) and len(value) == 2 and value[0] <= value[1]):
                faults.append(
                    "profiler.steps: must be the first and the last step, counted from 1, such as "
                    f"[10, 12], found {value!r}"
                )
        elif isinstance(PROFILER_KEYS[key], bool) and not isinstance(value, bool):
            faults.append(f"profiler.{key}: must be True or False, found {value!r}")
        elif type(PROFILER_KEYS[key]) is int and not counts([value], int(key == "active_steps")):
            faults.append(f"profiler.{key}: must be a whole number, found {value!r}")
    return faults


def _memory_faults(values: dict[str, Any]) -> list[str]:
    faults = []
    modes = (None, "none", "full", "selective")
    mode, option = values.get("ac_mode"), values.get("ac_option")
    if mode not in modes:
        faults.append(f"ac_mode: must be one of none, full, selective, found {mode!r}")
    if mode == "selective" and not (option == "op" or re.fullmatch("[1-9][0-9]*", str(option))):
        faults.append(
            "ac_option: must be op, or n to recompute every n-th layer, where ac_mode is "
            f"selective; found {option!r}"
        )
    checkpointing = values.get("enable_activation_checkpointing")
    if mode == "none" and checkpointing:
        faults.append("ac_mode: is none and enable_activation_checkpointing is True; remove one")
    recomputed = mode == "full" or (mode == "selective" and option != "op")
    if values.get("enable_activation_offloading") and not (
        recomputed or (mode is None and checkpointing)
    ):
        faults.append(
            "enable_activation_offloading: moves the inputs of recomputed layers; "
            "set enable_activation_checkpointing=True, or ac_mode=selective with a number"
        )
    if values.get("enable_fp8_training"):
        faults += _fp8_faults(values)
    reduced = values.get("fsdp_reduce_dtype")
    if reduced not in (None, "fp32", "bf16"):
        faults.append(f"fsdp_reduce_dtype: must be one of fp32, bf16, found {reduced!r}")
    masters = values.get("master_weights")
    if masters not in (None, "fp32"):
        faults.append(f"master_weights: must be fp32 or empty (as dtype), found {masters!r}")
    return faults


def _fp8_faults(values: dict[str, Any]) -> list[str]:
    faults = []
    recipe, model = values.get("fp8_recipe_name"), values.get("model") or {}
    if recipe not in (None, *FP8_RECIPES):
        known = ", ".join(FP8_RECIPES)
        faults.append(f"fp8_recipe_name: must be one of {known}, found {recipe!r}")
    if values.get("dtype") == "fp32":
        faults.append("enable_fp8_training: multiplies what is bf16; set dtype=bf16")
    preset = str(model.get("_component_")).rpartition(".")[2].startswith("qlora_")
    if model.get("quantize_base", preset):
        faults.append(
            "enable_fp8_training: the base is NF4 already; set model.quantize_base=False or "
            "enable_fp8_training=False"
        )
    return faults


def _block(content: dict[str, Any], key: str) -> dict[str, Any]:
    value = content.get(key)
    return value if isinstance(value, dict) else {}


def _notes(content: dict[str, Any]) -> list[str]:
    """One line for each key that was set aside, or that does less than it seems to."""
    notes = []
    saved, validated = content.get("save_every_n_steps"), content.get("run_val_every_n_steps")
    if saved and validated and saved % validated:
        notes.append(
            "save_every_n_steps: only a checkpoint at a multiple of run_val_every_n_steps has a "
            "val_loss and can be the best"
        )
    if content.get("optimizer_in_bwd"):
        notes.append("optimizer_in_bwd: set aside; the optimizer steps after the backward pass")
    if _block(content, "dataset").get("packed") and _block(content, "dataset").get(
        "split_across_pack"
    ):
        notes.append("dataset.split_across_pack: set aside; samples are packed whole")
    if content.get("tensor_parallel_plan"):
        notes.append("tensor_parallel_plan: set aside; the trainer has a plan of its own")
    if content.get("memory_efficient_fsdp_wrap"):
        notes.append("memory_efficient_fsdp_wrap: set aside; each block is sharded by itself")
    if content.get("enable_fp8_training") and not content.get("compile"):
        notes.append(
            "enable_fp8_training: its casts take longer than its products save unless they are "
            "compiled; set compile=True"
        )
    logger = str(_block(content, "metric_logger").get("_component_", ""))
    if logger and not logger.endswith(("DiskLogger", "StdoutLogger", "TensorBoardLogger")):
        notes.append(f"metric_logger: {logger} set aside; see metrics.jsonl and tensorboard/")
    return notes


def instantiate(key: str, block: dict[str, Any], *args: Any, **extra: Any) -> Any:
    """Call the component that a block names with the block's other keys.

    Raises:
        ConfigError: the component does not exist, or does not take these arguments.
    """
    dotted = _checked_component(key, block)["_component_"]
    factory = component(key, dotted)
    arguments = {k: v for k, v in block.items() if k != "_component_"} | extra
    try:
        return factory(*args, **arguments)
    except (TypeError, ValueError, FileNotFoundError, AssertionError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{key}: {dotted} refused its arguments: {reason}") from error


def arguments_of(key: str, block: dict[str, Any]) -> set[str]:
    """The names of what the component that a block names can be told."""
    return set(inspect.signature(component(key, block["_component_"])).parameters)


def component(key: str, dotted: str) -> Any:
    """What the dotted path of a `_component_` names; raises ConfigError where there is none."""
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
