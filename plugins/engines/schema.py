"""Names the keys of an engine's config that the engine does not know: schema.py ENGINE PROGRAM KEYS

Runs in the engine's environment, before the queue; prints {"unknown": {KEY: HINT}}, {"missing":
PACKAGE}, {"absent": WHAT} if the engine has no such program, or {"broken": MESSAGE} if it cannot be
imported. KEYS are the config's, as JSON; of the values only those of _target_ are needed.
Several engines ignore a key that they do not know, and train without it.
"""

import dataclasses
import difflib
import importlib
import inspect
import json
import sys
from collections.abc import Mapping
from typing import Any, get_type_hints

# Names of each block: None stands for a block of any keys.
Tree = dict[str, Any]


class Near(dict[str, Any]):
    """A block that may hold other keys, too: only misspelt ones are wrong."""


class Absent(Exception):
    """The engine has not what the entry names; its text says what it has."""


def of_dataclasses(*kinds: Any) -> Tree:
    """Return the fields of dataclasses, whose own blocks are open."""
    return {each.name: None for kind in kinds for each in dataclasses.fields(kind)}


def trl(program: str, content: Mapping[str, Any]) -> Tree:
    return of_dataclasses(*importlib.import_module(program).make_parser().dataclass_types)


def llamafactory(program: str, content: Mapping[str, Any]) -> Tree:
    module = importlib.import_module("llamafactory.hparams")
    names = ("Model", "Data", "Training", "Finetuning", "Generating")
    return of_dataclasses(*(getattr(module, f"{name}Arguments") for name in names))


def axolotl(program: str, content: Mapping[str, Any]) -> Tree:
    config = importlib.import_module("axolotl.utils.schemas.config").AxolotlInputConfig
    aliases = [field.alias for field in config.model_fields.values() if field.alias]
    return dict.fromkeys([*config.model_fields, *aliases])


def litgpt(program: str, content: Mapping[str, Any]) -> Tree:
    kind, _, method = program.partition("_")
    setup = importlib.import_module(f"litgpt.{kind}.{method}" if method else f"litgpt.{kind}").setup
    hints = get_type_hints(setup)
    return {
        name: of_dataclasses(hints[name]) if dataclasses.is_dataclass(hints.get(name)) else None
        for name in inspect.signature(setup).parameters
    }


class Asked(dict[str, Any]):
    """A config that notes the keys that are looked for in it."""

    def __init__(self, **content: Any) -> None:
        super().__init__(content)
        self.names: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.names.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.names.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.names.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self


def deepspeed(program: str, content: Mapping[str, Any]) -> Tree:
    """Return the keys that DeepSpeed looks for: it has no list of the outermost ones."""
    asked = Asked(train_batch_size=1)
    importlib.import_module("deepspeed.runtime.config").DeepSpeedConfig(asked)
    zero = importlib.import_module("deepspeed.runtime.zero.config").DeepSpeedZeroConfig
    aliases = [field.alias for field in zero.model_fields.values() if field.alias]
    blocks = {"zero_optimization": dict.fromkeys([*zero.model_fields, *aliases])}
    # The script may read keys of its own from this file.
    return Near({**dict.fromkeys(asked.names), **blocks})


# The blocks of its published configs; it has no list of them.
_AUTOMODEL = (
    "recipe step_scheduler dist_env rng seed model peft compile clip_grad_norm distributed loss_fn "
    "kd_loss_fn dataset validation_dataset packed_sequence dataloader validation_dataloader "
    "optimizer lr_scheduler checkpoint freeze_config wandb mlflow comet fp8 quantization qat"
)


def nemo_automodel(program: str, content: Mapping[str, Any]) -> Tree:
    """Return what the targets of its blocks take, and the fields of blocks that have none."""
    blocks = {k: of_target(v) for k, v in content.items() if isinstance(v, dict)}
    known: Tree = {k: blocks.get(k) for k in _AUTOMODEL.split()}
    for block, module, name, more in (
        ("step_scheduler", "training.step_scheduler", "StepSchedulerConfig", ["local_batch_size"]),
        ("checkpoint", "checkpoint.config", "CheckpointingConfig", ["restore_from"]),
        ("lr_scheduler", "optim.optimizer", "LRSchedulerConfig", ["_target_"]),
    ):
        kind = getattr(importlib.import_module(f"nemo_automodel.components.{module}"), name)
        known[block] = {**of_dataclasses(kind), **dict.fromkeys(more)}
    # Its recipes take some of these keys before the target gets the others.
    for block in ("distributed", "dataloader", "validation_dataloader"):
        known[block] = known[block] and Near(known[block])
    if isinstance(known["model"], dict):
        known["model"]["config"] = None
    # What begins with "_" is there for YAML's anchors.
    return Near({**known, **{key: None for key in content if key.startswith("_")}})


def torchtune(program: str, content: Mapping[str, Any]) -> Tree:
    """Return what the components of its blocks take; its programs look for their own keys."""
    importlib.import_module("torchtune")
    return Near({k: of_target(v) if isinstance(v, dict) else None for k, v in content.items()})


def of_target(block: Mapping[str, Any]) -> Tree:
    """Return the names that a block with a target may hold: the parameters of what it names."""
    inner = {key: of_target(each) for key, each in block.items() if isinstance(each, dict)}
    key = "_target_" if "_target_" in block else "_component_"
    target = block.get(key)
    parameters = parameters_of(target) if isinstance(target, str) else None
    if parameters is None:
        return Near(inner)
    names = [n for n, each in parameters.items() if each.kind != inspect.Parameter.VAR_KEYWORD]
    known: Tree = {**dict.fromkeys(names), key: None}
    if len(names) < len(parameters):
        return Near({**known, **inner})
    return {**known, **{key: each for key, each in inner.items() if key in known}}


def parameters_of(target: str) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of what a dotted path names, None if it cannot be imported here.

    Raises:
        Absent: its module has no such name.
    """
    module, _, name = target.rpartition(".")
    try:
        place = importlib.import_module(module)
    except ModuleNotFoundError:  # a method of a class
        module, _, kind = module.rpartition(".")
        try:
            place = getattr(importlib.import_module(module), kind)
        except Exception:
            return None
    except Exception:  # a login node has no GPU
        return None
    if not hasattr(place, name):
        near = difflib.get_close_matches(name, dir(place), 1)
        raise Absent(f"{module} has no {name!r}{f' (did you mean {near[0]}?)' if near else ''}")
    try:
        return inspect.signature(getattr(place, name)).parameters
    except (TypeError, ValueError):
        return None


def torchtitan(program: str, content: Mapping[str, Any]) -> Tree:
    """Return the fields of the config that MODULE/CONFIG makes, as it finds it itself."""
    importlib.import_module("torchtitan.config")
    name, _, config = program.partition("/")
    places = [f"torchtitan.models.{name}", f"torchtitan.experiments.{name}", name]
    for place in places:
        try:
            module = importlib.import_module(f"{place}.config_registry")
        except ModuleNotFoundError as error:
            if not place.startswith(str(error.name)) and error.name != f"{place}.config_registry":
                raise
            continue
        if hasattr(module, config):
            return of_instance(getattr(module, config)())
        near = difflib.get_close_matches(config, dir(module), 3)
        raise Absent(f"{name} has no config {config!r}; near to it: {', '.join(near) or 'none'}")
    raise Absent(f"there is no module {name!r} with a config_registry")


def of_instance(config: Any) -> Tree:
    """Return the fields of a dataclass, and those of the dataclasses in it."""
    values = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
    return {k: of_instance(v) if dataclasses.is_dataclass(v) else None for k, v in values.items()}


_ENGINES = (trl, llamafactory, axolotl, litgpt, deepspeed, nemo_automodel, torchtitan, torchtune)
SCHEMAS = {each.__name__: each for each in _ENGINES}


def unknown(content: Mapping[str, Any], known: Tree, above: str = "") -> dict[str, str]:
    """Return the keys that are not known, by dotted path, and the known name nearest to each."""
    suggestions = {}
    for key, value in content.items():
        if key not in known:
            is_strict = not isinstance(known, Near)
            near = difflib.get_close_matches(str(key), known, 1, 0.6 if is_strict else 0.8)
            if near or is_strict:
                suggestions[f"{above}{key}"] = f"{above}{near[0]}" if near else ""
        elif isinstance(value, dict) and isinstance(known[key], dict):
            suggestions |= unknown(value, known[key], f"{above}{key}.")
    return suggestions


def main() -> None:
    engine, program, keys = sys.argv[1:]
    content = json.loads(keys)
    try:
        faults = unknown(content, SCHEMAS[engine](program, content))
        answer: dict[str, Any] = {"unknown": faults}
    except Absent as why:
        answer = {"absent": str(why)}
    except ModuleNotFoundError as error:
        # A module of its own that is not there belongs to another version.
        is_package = error.name and not error.name.startswith(f"{engine}.")
        answer = {"missing": error.name} if is_package else {"broken": reason(error)}
    except Exception as error:  # whatever its packages raise
        answer = {"broken": reason(error)}
    print(json.dumps(answer))


def reason(error: BaseException) -> str:
    """Return the first line of the error that others followed from."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


if __name__ == "__main__":
    main()
