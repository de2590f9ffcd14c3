"""A run's train.yaml: read, checked, and made into one object with an attribute for each key.

A block may name a component by `_component_`: the class or function that is called with the block's
other keys.
"""

import importlib
import inspect
import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, make_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from runspec import yamlrules
from runspec.hints import nearest
from runspec.keys.common import COMMON
from runspec.keys.key import REQUIRED, Key, children, faults, unused
from runspec.keys.sft import SFT, TRANSFORMERS, notes, recomputed, with_train_on_input
from runspec.layout import FP8_MULTIPLE, StepFacts
from runspec.step import offloads, reduces_each
from trainer.errors import ConfigError

KEYS = SFT | {"output_dir": replace(COMMON["output_dir"], default=REQUIRED, unused="")}
PROFILER_KEYS = {name: key.default for name, key in children(SFT, "profiler").items()}
BLOCKS = ("model", "tokenizer", "dataset", "dataset_val", "optimizer", "lr_scheduler", "loss")
COMPONENT_PACKAGES = ("torch", "torchtune", "torchao", "trainer", "transformers", "bitsandbytes")
# Names packages and modules of the user's own, separated by commas, whose components are allowed
# too. It is set in the user's shell: a recipe, which may be a stranger's, cannot set it.
OWN_PACKAGES = "COOKBOOK_COMPONENTS"


def _used(keys: Mapping[str, Key]) -> dict[str, Key]:
    return {name: key for name, key in children(keys).items() if not (key.unused or key.refused)}


_Values = make_dataclass("_Values", [(name, Any) for name in _used(KEYS)], frozen=True)


@dataclass(frozen=True)
class TrainConfig(_Values):
    """A checked train.yaml: an attribute for each key that is used (see docs/keys.md).

    A method with keys of its own has a subclass with an attribute for each of them.

    output_dir is a Path; dataset_val holds what it takes from dataset; activation_checkpointing is
    as runspec.keys.sft.recomputed returns it. notes: about keys that are not used.
    """

    notes: tuple[str, ...]

    @property
    def model_folder(self) -> Path:
        """The Hugging Face folder that the weights come from."""
        return Path(self.checkpointer["checkpoint_dir"])

    @property
    def fp8_recipe(self) -> str | None:
        """How the products of the blocks are scaled in fp8; None without it."""
        return self.fp8_recipe_name if self.enable_fp8_training else None

    @property
    def row_multiple(self) -> int:
        """What the length of every row must be divisible by, for tensor parallelism and fp8."""
        return math.lcm(self.tensor_parallel_dim, FP8_MULTIPLE if self.enable_fp8_training else 1)

    @property
    def data_cache(self) -> Path:
        """The folder of tokenised datasets; beside the run directories if none is given."""
        if self.data_cache_dir is None:
            return self.output_dir.parent / ".data_cache"
        return Path(self.data_cache_dir).expanduser().absolute()


def load(path: Path, keys: Mapping[str, Key] = KEYS) -> TrainConfig:
    """Read and check `path`.

    Args:
        keys: those of the method.

    Raises:
        ConfigError: the file cannot be read, or values are wrong; names all faults at once.
    """
    return parse(read_yaml(path), keys)


def read_yaml(path: Path) -> dict[str, Any]:
    """The resolved content of a YAML file; raises ConfigError with line and column."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.load(text, Loader=yamlrules.loader(yaml))
        # The launcher has resolved every interpolation, and OmegaConf takes a while to import.
        if "${" in text:
            content = _interpolated(path, content)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the run's train.yaml") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = getattr(error, "problem", None) or "not YAML"
        raise ConfigError(f"{path}{where}: {reason}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold keys and values, found {type(content).__name__}")
    return {str(key): value for key, value in content.items()}


def _interpolated(path: Path, content: Any) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(OmegaConf.create(content), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from None


def parse(content: dict[str, Any], keys: Mapping[str, Key] = KEYS) -> TrainConfig:
    """Check a resolved config by the keys of its method.

    Raises:
        ConfigError: all faults at once.
    """
    found, used = list(faults(content, keys)), _used(KEYS) | _used(keys)
    wrong = {fault.key.partition(".")[0] for fault in found}
    given = {name: None if name in wrong else content.get(name) for name in used}
    values = _complete(_with_defaults(given, used))
    if texts := [fault.text for fault in found] + list(_faults_between_keys(values)):
        raise ConfigError(*texts)
    values["output_dir"] = Path(values["output_dir"]).absolute()
    values["activation_checkpointing"] = recomputed(values)
    return _class(tuple(used))(**values, notes=tuple(_notes(content)))


@cache
def _class(names: tuple[str, ...]) -> type[TrainConfig]:
    own = [(name, Any) for name in names if name not in _used(KEYS)]
    bases = (TrainConfig,)
    return make_dataclass("TrainConfig", own, bases=bases, frozen=True) if own else TrainConfig


def _with_defaults(given: dict[str, Any], used: Mapping[str, Key]) -> dict[str, Any]:
    """The given values, else the defaults; None for a required one."""
    defaults = {n: None if key.default is REQUIRED else key.default for n, key in used.items()}
    return {name: defaults[name] if value is None else value for name, value in given.items()}


def _complete(values: dict[str, Any]) -> dict[str, Any]:
    """Values with what follows from others."""
    values["model"] = {"_component_": TRANSFORMERS, **(values["model"] or {})}
    values["fsdp_cpu_offload"] = offloads(values)
    values["sync_each_micro_batch"] = reduces_each(values)
    if values["batch_size_val"] is None:
        values["batch_size_val"] = values["batch_size"]
    for key in ("dataset", "dataset_val"):
        values[key] = with_train_on_input(values[key], False)
    training, validation = values["dataset"], values["dataset_val"]
    # What dataset_val leaves out is dataset's, unless it names a component with other keys.
    component_of = (validation or {}).get("_component_")
    if training and validation and component_of in (None, training["_component_"]):
        values["dataset_val"] = {**training, **validation}
    return values


def _faults_between_keys(values: dict[str, Any]) -> Iterator[str]:
    """Everything that is wrong between keys.

    Args:
        values: a value of its kind for each key, the default if it is not given; None for a
            required one that is missing or wrong.
    """
    for key in BLOCKS:
        if "_component_" in (values[key] or {}):
            yield from _prefix_faults(key, values[key])
    tokenizer, model = values["tokenizer"], values["model"] or {}
    if not values["dataset_val"]:
        if values["run_val_every_n_steps"]:
            yield "run_val_every_n_steps: needs dataset_val, such as dataset_val.split=train[95%:]"
        if values["export_checkpoint"] == "best":
            yield "export_checkpoint: best needs dataset_val, such as dataset_val.split=..."
    for key in ("dataset", "dataset_val"):
        is_packed = tokenizer and (values[key] or {}).get("packed")
        if is_packed and not tokenizer.get("max_seq_len"):
            yield f"{key}.packed: set tokenizer.max_seq_len, the length of a packed row"
    mode, layers = values["ac_mode"], recomputed(values)
    if mode == "selective" and layers is None:
        yield (
            "ac_option: must be op, or n to recompute every n-th layer, if ac_mode is selective; "
            f"got {values['ac_option']!r}"
        )
    if mode == "none" and values["enable_activation_checkpointing"]:
        yield "ac_mode: is none and enable_activation_checkpointing is True; remove one"
    if values["enable_activation_offloading"] and not isinstance(layers, int):
        yield (
            "enable_activation_offloading: moves the inputs of recomputed layers; set "
            "activation_checkpointing to full or a number"
        )
    is_qlora = str(model.get("_component_")).rpartition(".")[2].startswith("qlora_")
    yield from StepFacts(
        fp8=values["enable_fp8_training"],
        fp32=values["dtype"] == "fp32",
        quantised=model.get("quantize_base", is_qlora),
    ).faults()
    if values["generate"] and values["save_adapter_weights_only"]:
        yield "generate: needs the merged model; set save_adapter_weights_only=False"


def _notes(content: dict[str, Any]) -> Iterator[str]:
    """One line for each key that is not used, or that does less than it seems to."""
    for key in unused(content, SFT):
        yield f"{key.name} is not used: {key.unused}"
    yield from notes(content)


def _prefix_faults(key: str, block: dict[str, Any]) -> list[str]:
    """A fault if the dotted path of a block's `_component_` may not be imported."""
    dotted = block["_component_"]
    own = os.environ.get(OWN_PACKAGES, "").replace(",", " ").split()
    if key == "model" and dotted == TRANSFORMERS:
        return []
    if dotted.startswith(tuple(f"{name}." for name in (*COMPONENT_PACKAGES, *own))):
        return []
    return [
        f"{key}._component_: {dotted!r} is not allowed; it must begin with one of "
        f"{'., '.join(COMPONENT_PACKAGES)}., or with a package of yours that the variable "
        f"{OWN_PACKAGES} names"
    ]


def instantiate(key: str, block: dict[str, Any], *args: Any, **extra: Any) -> Any:
    """Call the component that a block names with the block's other keys.

    Raises:
        ConfigError: the component does not exist, or does not take these arguments.
    """
    if refused := _prefix_faults(key, block):
        raise ConfigError(*refused)
    dotted = block["_component_"]
    factory = component(key, dotted)
    arguments = {k: v for k, v in block.items() if k != "_component_"} | extra
    try:
        return factory(*args, **arguments)
    except (TypeError, ValueError, FileNotFoundError, AssertionError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{key}: {dotted} refused its arguments: {reason}") from error


def arguments_of(key: str, block: dict[str, Any]) -> set[str]:
    """The names of the arguments that the component of a block takes."""
    return set(inspect.signature(component(key, block["_component_"])).parameters)


def quiet_torchao() -> None:
    """Let torchao, which torchtune imports, keep a note to itself.

    It says that its C++ kernels do not fit this torch; none of them is used here.
    """
    logging.getLogger("torchao").addFilter(_is_no_kernel_note)


def _is_no_kernel_note(record: logging.LogRecord) -> bool:
    return "Skipping import of cpp extensions" not in record.getMessage()


def component(key: str, dotted: str) -> Any:
    """The class or function at a dotted path; raises ConfigError if there is none."""
    module_name, _, name = dotted.rpartition(".")
    quiet_torchao()
    try:
        return getattr(importlib.import_module(module_name), name)
    except ImportError as error:
        raise ConfigError(f"{key}._component_: {dotted} cannot be imported: {error}") from None
    except AttributeError:
        known = [n for n in dir(importlib.import_module(module_name)) if not n.startswith("_")]
        hint = nearest(name, known)
        raise ConfigError(f"{key}._component_: {module_name} has no {name}{hint}") from None
