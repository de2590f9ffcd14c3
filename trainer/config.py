"""A run's train.yaml: read, checked, and made into one object with an attribute for each key.

A block may name a component by `_component_`: the class or function that is called with the block's
other keys.
"""

import importlib
import inspect
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from typing_extensions import TypeVar

from runspec import yamlrules
from runspec.adapters import name_of
from runspec.hints import nearest
from runspec.keys.common import COMMON
from runspec.keys.fields import STREAM, names_no_files
from runspec.keys.key import REQUIRED, Key, children, faults, unused
from runspec.keys.model import TRANSFORMERS
from runspec.keys.sft import SftConfig
from runspec.keys.train import TrainConfig as TrainConfig
from runspec.keys.train import recomputed, with_train_on_input
from runspec.layout import StepFacts
from runspec.step import reduces_each
from runspec.storage import patiently
from trainer.errors import ConfigError

Config = TypeVar("Config", bound=TrainConfig, default=SftConfig)
OUTPUT_DIR = replace(COMMON["output_dir"], default=REQUIRED, unused="")
PROFILER_KEYS = {
    name: key.default for name, key in children(TrainConfig.keys(), "profiler").items()
}
ALL_SHARED = (
    "dataset_val: each of its samples is in dataset too; take them apart, such as "
    "dataset.split=train[:95%] dataset_val.split=train[95%:]"
)
# What the kit has under torchtune's names; torchtune itself is never imported.
_COSINE = "get_cosine_schedule_with_warmup"
OWN_COMPONENTS = {
    f"torchtune.training.lr_schedulers.{_COSINE}": f"trainer.schedule.{_COSINE}",
    "torchtune.datasets.text_completion_dataset": "trainer.data.instructions.Texts",
} | {
    f"torchtune.datasets.{name}_dataset": f"trainer.data.instructions.{name}_dataset"
    for name in ("alpaca", "alpaca_cleaned", "chat", "instruct")
}
COMPONENT_PACKAGES = ("torch", "torchao", "trainer", "transformers", "bitsandbytes")
# Names packages and modules of the user's own, separated by commas, whose components are allowed
# too. It is set in the user's shell: a recipe, which may be a stranger's, cannot set it.
OWN_PACKAGES = "COOKBOOK_COMPONENTS"


def load(path: Path, method: type[Config] = SftConfig) -> Config:  # type: ignore[assignment]
    """Read and check `path`.

    Args:
        method: its config's class.

    Raises:
        ConfigError: the file cannot be read, or values are wrong; names all faults at once.
    """
    return parse(read_yaml(path), method)


def read_yaml(path: Path) -> dict[str, Any]:
    """The resolved content of a YAML file; raises ConfigError with line and column."""
    import yaml

    try:
        text = patiently(Path.read_bytes, path).decode("utf-8")
        content = yaml.load(text, Loader=yamlrules.loader(yaml))
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


def parse(
    content: dict[str, Any],
    method: type[Config] = SftConfig,  # type: ignore[assignment]
) -> Config:
    """Check a resolved config by the keys of its method.

    Raises:
        ConfigError: all faults at once.
    """
    keys = method.keys() | {OUTPUT_DIR.name: OUTPUT_DIR}
    wrong_keys = list(faults(content, keys))
    used = {n: key for n, key in children(keys).items() if not (key.unused or key.refused)}
    wrong = {fault.key.partition(".")[0] for fault in wrong_keys}
    given = {name: None if name in wrong else content.get(name) for name in used}
    values = _complete(_with_defaults(given, used))
    texts = [fault.text for fault in wrong_keys] + list(_faults_between_keys(values, used))
    if texts := texts + list(_stream_faults(values, method)):
        raise ConfigError(*texts)
    values["output_dir"] = Path(values["output_dir"]).absolute()
    values["activation_checkpointing"] = recomputed(values)
    return method(**values, notes=tuple(_notes(content, method)))


def _with_defaults(given: dict[str, Any], used: Mapping[str, Key]) -> dict[str, Any]:
    """The given values, else the defaults; None for a required one."""
    defaults = {n: None if key.default is REQUIRED else key.default for n, key in used.items()}
    return {name: defaults[name] if value is None else value for name, value in given.items()}


def _complete(values: dict[str, Any]) -> dict[str, Any]:
    """Values with what follows from others."""
    values["model"] = {"_component_": TRANSFORMERS, **(values["model"] or {})}
    values["sync_each_micro_batch"] = reduces_each(values)
    if values["batch_size_val"] is None:
        values["batch_size_val"] = values["batch_size"]
    for key in ("dataset", "dataset_val"):
        values[key] = with_train_on_input(values[key], False)
    if (values["dataset"] or {}).get("_component_") == STREAM:
        values["dataset"] = {**values["dataset"], "packed": True}
    training, validation = values["dataset"], values["dataset_val"]
    # What dataset_val leaves out is dataset's, unless it names a component with other keys.
    component_of = (validation or {}).get("_component_")
    if training and validation and component_of in (None, training["_component_"]):
        values["dataset_val"] = {**training, **validation}
    return values


def _faults_between_keys(values: dict[str, Any], used: Mapping[str, Key]) -> Iterator[str]:
    """Everything that is wrong between keys.

    Args:
        used: the keys.
        values: a value of its kind for each key, the default if it is not given; None for a
            required one that is missing or wrong.
    """
    for name, key in used.items():
        # A checkpointer's component is named by torchtune's configs, and never called.
        if key.is_open and name != "checkpointer" and "_component_" in (values[name] or {}):
            yield from _prefix_faults(name, values[name])
    tokenizer, model = values["tokenizer"], values["model"] or {}
    if not values["dataset_val"]:
        if values["run_val_every_n_steps"]:
            yield "run_val_every_n_steps: needs dataset_val, such as dataset_val.split=train[95%:]"
        if values["export_checkpoint"] == "best":
            yield "export_checkpoint: best needs dataset_val, such as dataset_val.split=..."
    elif values["dataset_val"] == values["dataset"]:
        yield ALL_SHARED
    for name in ("dataset", "dataset_val"):
        if why := names_no_files(values[name] or {}):
            yield f"{name}.{why}: set {name}.data_files="
        is_packed = tokenizer and (values[name] or {}).get("packed")
        if is_packed and not tokenizer.get("max_seq_len"):
            yield f"{name}.packed: set tokenizer.max_seq_len, the length of a packed row"
    if values["enable_activation_offloading"] and not isinstance(recomputed(values), int):
        yield (
            "enable_activation_offloading: moves the inputs of recomputed layers; set "
            "activation_checkpointing to full or a number"
        )
    yield from StepFacts(
        fp8=values["enable_fp8_training"],
        fp32=values["dtype"] == "fp32",
        adapted=name_of(model) is not None,
    ).faults()


def _stream_faults(values: dict[str, Any], method: type[TrainConfig]) -> Iterator[str]:
    dataset = values["dataset"] or {}
    if dataset.get("_component_") == STREAM:
        if not method.streams:
            yield "dataset: only entry: pretrain trains on a stream"
        if not values["max_steps"]:
            yield "max_steps: a stream has no end; set max_steps to the number of steps"
        given = {"max_steps_per_epoch": values["max_steps_per_epoch"]}
        given["dataset.split"] = dataset.get("split")
        for key in (key for key, value in given.items() if value):
            yield f"{key}: a stream has no epochs and no splits; leave it out"
    if (values["dataset_val"] or {}).get("_component_") == STREAM:
        yield (
            "dataset_val: is measured whole, so it cannot be a stream; set dataset_val._component_="
            "torchtune.datasets.text_completion_dataset with source, data_files and column"
        )


def _notes(content: dict[str, Any], method: type[TrainConfig]) -> Iterator[str]:
    """One line for each key that is not used, or that does less than it seems to."""
    for key in unused(content, method.keys() | {OUTPUT_DIR.name: OUTPUT_DIR}):
        yield f"{key.name} is not used: {key.unused}"
    yield from method.key_notes(content)


def refused_path(place: str, dotted: str) -> str | None:
    """Why the dotted path that a config names at `place` may not be imported; None if it may."""
    own = os.environ.get(OWN_PACKAGES, "").replace(",", " ").split()
    allowed = tuple(f"{name}." for name in (*COMPONENT_PACKAGES, *own))
    if OWN_COMPONENTS.get(dotted, dotted).startswith(allowed):
        return None
    if dotted.startswith("torchtune."):
        known = [name for name in OWN_COMPONENTS if name.startswith(dotted[:19])]
        return (
            f"{place}: the kit's trainer has no {dotted}{nearest(dotted, known)}; torchtune's own "
            "programs have it, such as entry: torchtune:full_finetune_distributed"
        )
    return (
        f"{place}: {dotted!r} is not allowed; it must begin with one of "
        f"{'., '.join(COMPONENT_PACKAGES)}., or with a package of yours that the variable "
        f"{OWN_PACKAGES} names"
    )


def _prefix_faults(key: str, block: dict[str, Any]) -> list[str]:
    """A fault if the dotted path of a block's `_component_` may not be imported."""
    if key == "model" and block["_component_"] == TRANSFORMERS:
        return []
    refused = refused_path(f"{key}._component_", block["_component_"])
    return [] if refused is None else [refused]


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
        if empty := [f"{key}.{name}" for name, value in block.items() if value is None]:
            reason += f" (null: {', '.join(empty)})"
        raise ConfigError(f"{key}: {dotted} refused its arguments: {reason}") from error


def arguments_of(key: str, block: dict[str, Any]) -> set[str]:
    """The names of the arguments that the component of a block takes."""
    return set(inspect.signature(component(key, block["_component_"])).parameters)


def component(key: str, dotted: str) -> Any:
    """The class or function at a dotted path; raises ConfigError if there is none."""
    module_name, _, name = OWN_COMPONENTS.get(dotted, dotted).rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), name)
    except ImportError as error:
        raise ConfigError(f"{key}._component_: {dotted} cannot be imported: {error}") from None
    except AttributeError:
        known = [n for n in dir(importlib.import_module(module_name)) if not n.startswith("_")]
        hint = nearest(name, known)
        raise ConfigError(f"{key}._component_: {module_name} has no {name}{hint}") from None
