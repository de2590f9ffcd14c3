"""Training goes on from an adapter: of our own export, or of PEFT."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from runspec.files import DamagedFile, patient_json
from runspec.keys.train import ModelSpec
from trainer.checkpoint import weights
from trainer.errors import ConfigError
from trainer.layers.adapters.peft_config import REMEDY
from trainer.model import PEFT_PREFIX, SCORE, Decoder, pattern
from trainer.models.build import Model

KEY = "checkpointer.adapter_checkpoint"
# PEFT's copy of a tied embedding that is trained beside LoRA.
TIED_HEAD = f"{PEFT_PREFIX}lm_head.weight"
_BASE_LAYER = ".base_layer.weight"
FILE, SETTINGS = "adapter_model.safetensors", "adapter_config.json"


@torch.no_grad()
def load(model: Model, spec: ModelSpec) -> Path:
    """Fill the model's adapter from the file that `spec` names; return its path.

    Each rank keeps its own part of each tensor.

    Raises:
        ConfigError: the file cannot be read, or its adapter is not the model's: all differences.
    """
    path, tensors = read(model.module, spec)
    whole = dict(saved_of(model.module).values())
    for name, parameter in (_adapter_parameters(model.module) | whole).items():
        weights.fill(parameter, tensors[name])
    if model.module.score_head is not None and SCORE in tensors:
        weights.fill(model.module.score_head.weight, tensors[SCORE])
    return path


def read(model: Decoder, spec: ModelSpec) -> tuple[Path, dict[str, torch.Tensor]]:
    """The adapter that `spec` names, checked against `model`, which may be on the meta device.

    Raises:
        ConfigError: the file cannot be read, or its adapter is not the model's: all differences.
    """
    path = file_of(spec)
    if model.adapter is None:
        raise ConfigError(f"{KEY}: the model has no adapter; set model.lora_rank or model.adapter")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{KEY}: {path} cannot be read: {error}") from None
    settings = _settings(path.with_name(SETTINGS))
    if settings is None and any(name.startswith(PEFT_PREFIX) for name in tensors):
        raise ConfigError(
            f"{KEY}: {path.parent} has no {SETTINGS}, which says the adapter's scale; copy "
            "it there from where the adapter was made"
        )
    faults: list[str] = []
    saved = {key: name for key, (name, _) in saved_of(model).items()}
    faults += [f"has no {key}" for key in sorted(saved.keys() - tensors.keys())]
    whole = {name: tensors.pop(key) for key, name in saved.items() if key in tensors}
    if whole and model.is_tied:
        tensors.pop(TIED_HEAD, None)
    whole |= _score(model, tensors, faults)
    if whole and settings is not None:
        settings = {key: value for key, value in settings.items() if key != "modules_to_save"}
    faults += _other_base(model, spec, tensors)
    loaded = model.adapter.from_peft(model, weights.hub_tensors(model), tensors, settings, faults)
    # Another rank shows in the shapes, too.
    differences = _differences(_adapter_parameters(model), loaded)
    some = (settings or {}).get("layers_to_transform")
    if differences and some is not None:
        differences = [
            f"the adapter has layers_to_transform={some}, and the model an adapter in every layer; "
            f"{REMEDY}"
        ]
    if faults := faults or differences:
        raise ConfigError(*(f"{KEY}: {fault}" for fault in dict.fromkeys(faults)))
    return path, loaded | whole


def _other_base(model: Decoder, spec: ModelSpec, tensors: dict[str, torch.Tensor]) -> Iterator[str]:
    """Take PEFT's copies of embedding and output head out of tensors; a fault if they are others.

    PEFT adds them if an adapter is over one of these.
    """
    copies = {name: tensors.pop(name) for name in [*tensors] if name.endswith(_BASE_LAYER)}
    if not copies:
        return
    source = weights.SafetensorsSource.open(spec.checkpointer)
    for name, copy in copies.items():
        table = name.removeprefix(PEFT_PREFIX).removesuffix(_BASE_LAYER)
        key = model.file_name(f"{table}.weight")
        if key not in source.shapes and model.is_tied:
            tables = (weights.file_of(model, f"{t}.weight") for t in model.tables)
            key = next(filter(None, tables), "")
        if (
            key not in source.shapes
            or source.shapes[key] != tuple(copy.shape)
            or source.differs(key, copy)
        ):
            yield (
                f"contains other weights of {name.removeprefix(PEFT_PREFIX)} than "
                f"{spec.model_folder}; {REMEDY}"
            )


def _score(
    model: Decoder, tensors: dict[str, torch.Tensor], faults: list[str]
) -> dict[str, torch.Tensor]:
    """Take the score head's weight out of tensors, if the model has one."""
    names = (SCORE, PEFT_PREFIX + SCORE)
    if model.score_head is None or not (present := [n for n in names if n in tensors]):
        return {}
    score = tensors.pop(present[0])
    if score.shape != model.score_head.weight.shape:
        faults.append(f"its score head gives {score.shape[0]} numbers, a reward model one")
    return {SCORE: score}


def saved_of(model: Decoder) -> dict[str, tuple[str, nn.Parameter]]:
    """What is trained whole beside the adapter, (plain name, parameter) by PEFT's name."""
    return {
        PEFT_PREFIX + (model.hub_name(name) or name): (name, parameter)
        for name, parameter in weights.named_parameters(model)
        if model.is_saved(name)
    }


def _settings(file: Path) -> dict[str, Any] | None:
    """The content of the settings beside an adapter's file; None if there are none."""
    try:
        return patient_json(file)
    except DamagedFile as error:
        raise ConfigError(f"{error}; copy it again from where it was made") from None


def file_of(spec: ModelSpec) -> Path:
    """The adapter's file that `spec` names.

    A relative path counts from here, then from checkpoint_dir. Raises ConfigError if it is missing.
    """
    named, model_folder = spec.checkpointer["adapter_checkpoint"], spec.model_folder
    given = Path(named).expanduser()
    path = next((p for p in (given, model_folder / given) if p.exists()), None)
    if path is None:
        raise ConfigError(f"{KEY}: {named} does not exist; give an adapter's folder or file")
    if path.is_dir():
        path /= FILE
    if path.suffix != ".safetensors":
        raise ConfigError(
            f"{KEY}: {path} is no safetensors file; pickled adapters are not read, give "
            f"{FILE} or its folder"
        )
    if not path.is_file():
        raise ConfigError(f"{KEY}: {path} is missing; give an adapter's folder or file")
    return path


def _adapter_parameters(module: Decoder) -> dict[str, nn.Parameter]:
    kind = module.adapter
    named = weights.named_parameters(module)
    return {name: p for name, p in named if kind is not None and kind.owns(name)}


def _differences(own: dict[str, nn.Parameter], tensors: dict[str, torch.Tensor]) -> list[str]:
    """One line per kind of layer that only one of the two has, or that has another rank."""
    missing = {pattern(name) for name in own.keys() - tensors.keys()}
    surplus = {pattern(name) for name in tensors.keys() - own.keys()}
    faults = [f"has nothing for the model's {kind}" for kind in sorted(missing)]
    faults += [f"contains {kind}, the model has none" for kind in sorted(surplus)]
    shapes = {
        pattern(name): (list(tensors[name].shape), list(parameter.shape))
        for name, parameter in own.items()
        if name in tensors and tensors[name].shape != parameter.shape
    }
    return faults + [
        f"{kind} has shape {theirs}, the model's {ours} (model.lora_rank?)"
        for kind, (theirs, ours) in sorted(shapes.items())
    ]
