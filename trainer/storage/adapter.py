"""Training goes on from an adapter: of our own export, of PEFT, or of torchtune."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from runspec.files import read_json_or_none
from trainer.config import TrainConfig
from trainer.errors import ConfigError
from trainer.layers.adapters.base import PEFT_PREFIX, Loaded, kind_of_layer
from trainer.models.build import Model
from trainer.models.decoder import Decoder
from trainer.storage import weights

KEY = "checkpointer.adapter_checkpoint"
FILE, SETTINGS = "adapter_model.safetensors", "adapter_config.json"


@torch.no_grad()
def load(model: Model, config: TrainConfig) -> Path:
    """Fill the model's adapter from the file that the config names; return its path.

    Each rank keeps its own part of each tensor. The adapter's scale becomes that of the layers.

    Raises:
        ConfigError: the file cannot be read, or its adapter is not the model's: all differences.
    """
    path, adapter = read(model.module, config)
    for name, parameter in _adapter_parameters(model.module).items():
        weights.fill(parameter, adapter.tensors[name])
    modules = {weights.plain_name(name): m for name, m in model.module.named_modules()}
    for name, attributes in adapter.attributes.items():
        for attribute, value in attributes.items():
            setattr(modules[name], attribute, value)
    return path


def read(model: Decoder, config: TrainConfig) -> tuple[Path, Loaded]:
    """The adapter that the config names, checked against `model`, which may be on the meta device.

    Raises:
        ConfigError: the file cannot be read, or its adapter is not the model's: all differences.
    """
    path = _file(config.checkpointer["adapter_checkpoint"], config.model_folder)
    if model.adapter is None:
        raise ConfigError(
            f"{KEY}: the model has no adapter; set model.lora_rank or model.adapter, or "
            "model._component_ to a lora_* one"
        )
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
    loaded = model.adapter.from_peft(model, weights.hub_tensors(model), tensors, settings, faults)
    # Another rank shows in the shapes, too.
    if faults := faults or _differences(_adapter_parameters(model), loaded.tensors):
        raise ConfigError(*(f"{KEY}: {fault}" for fault in dict.fromkeys(faults)))
    return path, loaded


def _settings(file: Path) -> dict[str, Any] | None:
    """The content of the settings beside an adapter's file; None if there are none."""
    if not file.exists():
        return None
    content = read_json_or_none(file)
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is no JSON object; copy it again from where it was made")
    return content


def _file(named: str, model_folder: Path) -> Path:
    """The adapter's file; a relative path counts from here, then from checkpoint_dir."""
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
    return {name: p for name, p in named if kind is not None and kind.trains(name)}


def _differences(own: dict[str, nn.Parameter], tensors: dict[str, torch.Tensor]) -> list[str]:
    """One line per kind of layer that only one of the two has, or that has another rank."""
    missing = {kind_of_layer(name) for name in own.keys() - tensors.keys()}
    surplus = {kind_of_layer(name) for name in tensors.keys() - own.keys()}
    faults = [f"holds nothing for the model's {kind}" for kind in sorted(missing)]
    faults += [f"holds {kind}, the model has none" for kind in sorted(surplus)]
    shapes = {
        kind_of_layer(name): (list(tensors[name].shape), list(parameter.shape))
        for name, parameter in own.items()
        if name in tensors and tensors[name].shape != parameter.shape
    }
    return faults + [
        f"{kind} has shape {theirs}, the model's {ours} (model.lora_rank?)"
        for kind, (theirs, ours) in sorted(shapes.items())
    ]
