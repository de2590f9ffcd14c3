"""Training goes on from an adapter: of our own export, of PEFT, or of torchtune."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from trainer.config import TrainConfig
from trainer.errors import ConfigError
from trainer.layers import experts, lora
from trainer.models.build import Model
from trainer.models.decoder import Decoder
from trainer.storage import peft_config, weights
from trainer.storage.peft_config import PeftConfig

KEY = "checkpointer.adapter_checkpoint"
FILE = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Adapter:
    """An adapter's file as a model takes it.

    tensors: whole, by the model's own names. scalings: what B A is multiplied by, by the name of
    the layer; empty if nothing says so beside the file. use_rslora: as PEFT's field.
    """

    path: Path
    tensors: dict[str, torch.Tensor]
    scalings: dict[str, float]
    use_rslora: bool


@torch.no_grad()
def load(model: Model, config: TrainConfig) -> Path:
    """Fill the model's adapter from the file that the config names; return its path.

    Each rank keeps its own part of each tensor. The adapter's scale becomes that of the layers.

    Raises:
        ConfigError: the file cannot be read, or its adapter is not the model's: all differences.
    """
    adapter = read(model.module, config)
    for name, parameter in _adapter_parameters(model.module).items():
        weights.fill(parameter, adapter.tensors[name])
    for name, layer in _adapted(model.module).items():
        layer.scaling = adapter.scalings.get(name, layer.scaling)
        layer.use_rslora = adapter.use_rslora
    return adapter.path


def read(model: Decoder, config: TrainConfig) -> Adapter:
    """The adapter that the config names, checked against `model`, which may be on the meta device.

    Raises:
        ConfigError: the file cannot be read, or its adapter is not the model's: all differences.
    """
    path = _file(config.checkpointer["adapter_checkpoint"], config.model_folder)
    own = _adapter_parameters(model)
    if not own:
        raise ConfigError(f"{KEY}: the model has no adapter; set model._component_ to a lora_* one")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{KEY}: {path} cannot be read: {error}") from None
    settings = PeftConfig.beside(path)
    of_peft = any(name.startswith(PEFT_PREFIX) for name in tensors)
    if settings is None and of_peft:
        raise ConfigError(
            f"{KEY}: {path.parent} has no {peft_config.NAME}, which says the adapter's scale; copy "
            "it there from where the adapter was made"
        )
    scalings: dict[str, float] = {}
    faults = [] if settings is None else _setting_faults(model, settings, scalings)
    if of_peft:
        tensors = _from_peft(model, tensors, faults)
    # Another rank shows in the shapes, too.
    faults = faults or _differences(own, tensors)
    if faults:
        raise ConfigError(*dict.fromkeys(faults))
    return Adapter(path, tensors, scalings, bool(settings and settings.use_rslora))


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


def _adapter_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in weights.named_parameters(module) if lora.is_adapter(n)}


def _adapted(model: Decoder) -> dict[str, nn.Module]:
    """The layers with an adapter by their plain names."""
    own = set(lora.adapted_layers(model))
    return {weights.plain_name(n): layer for n, layer in model.named_modules() if layer in own}


def _setting_faults(model: Decoder, settings: PeftConfig, scalings: dict[str, float]) -> list[str]:
    """What an adapter's settings say, and the model does otherwise or cannot do.

    Adds each layer's factor of B A to `scalings`.
    """
    faults = [
        f"{KEY}: the adapter has {field}, which is not supported; {peft_config.REMEDY}"
        for field in settings.unsupported()
    ]
    layers = _adapted(model)
    layer = next(iter(layers.values()))
    alpha = layer.scaling / peft_config.scaling(layer.rank, 1, layer.use_rslora)
    use_dora = "DoRA" in lora.method(model)
    faults += [
        f"{KEY}: the adapter has {theirs}={old}, the model {ours}={new}; set {ours}={old}"
        for theirs, ours, old, new in (
            ("r", "model.lora_rank", settings.rank, layer.rank),
            ("lora_alpha", "model.lora_alpha", settings.alpha, alpha),
            ("use_dora", "model.use_dora", bool(settings.use_dora), use_dora),
        )
        if not math.isclose(old, new)
    ]
    if faults:
        return faults
    for place, names in _places(model, layers).items():
        rank, factor = settings.rank_of(place), settings.scaling_of(place)
        for name in names:
            own = layers[name].rank
            # An export of our own has the adapters of several layers as blocks of one.
            if rank not in (own, own * len(names)):
                faults.append(
                    f"{KEY}: rank_pattern gives {_kind(place)} rank {rank}, the model has "
                    f"model.lora_rank={own} in all layers; {peft_config.REMEDY}"
                )
            elif not math.isclose(scalings.setdefault(name, factor), factor):
                faults.append(
                    f"{KEY}: alpha_pattern scales the matrices of {_kind(name)} differently, which "
                    f"is not supported; {peft_config.REMEDY}"
                )
    return faults


def _places(model: Decoder, layers: dict[str, nn.Module]) -> dict[str, list[str]]:
    """By module (or matrix of experts) of transformers' class, the layers whose adapter it has."""
    places = {
        model.peft_name(key).removesuffix(".weight"): [
            name
            for part, _ in parts
            if part.endswith(".weight") and (name := part.removesuffix(".weight")) in layers
        ]
        for key, parts in weights.hub_tensors(model).items()
        if key is not None
    }
    for name, _ in experts.layers(model):
        for matrix in experts.MATRICES if name in layers else ():
            places[f"{model.peft_module(name)}.{matrix}"] = [name]
    return {place: names for place, names in places.items() if names}


def _from_peft(
    model: Decoder, tensors: dict[str, torch.Tensor], faults: list[str]
) -> dict[str, torch.Tensor]:
    """PEFT's tensors by the model's own names; adds what cannot be split to `faults`.

    If one matrix of the hub holds the rows of several layers, an adapter of our own export has all
    their A's, and the B's are the blocks on its diagonal; any other has one A, which each layer
    then gets.
    """
    found, used, shapes = {}, set(), _adapter_parameters(model)
    for key, parts in weights.hub_tensors(model).items():
        place = PEFT_PREFIX + model.peft_name(key).removesuffix(".weight")
        a, b = tensors.get(f"{place}.lora_A.weight"), tensors.get(f"{place}.lora_B.weight")
        if a is None or b is None:
            continue
        used |= {f"{place}.lora_A.weight", f"{place}.lora_B.weight"}
        magnitude = tensors.get(f"{place}.lora_magnitude_vector")
        layers = {name.removesuffix(".weight"): p.shape[0] for name, p in parts}
        adapted = [n for n in layers if f"{n}.lora_a.weight" in shapes]
        shared = len(adapted) < 2 or len(a) == len(shapes[f"{adapted[0]}.lora_a.weight"])
        row = column = 0
        for name, rows in layers.items():
            block = b[row : row + rows]
            if name in adapted:
                rank = len(a) if shared else len(a) // len(adapted)
                own = slice(None) if shared else slice(column, column + rank)
                column += rank
                found[f"{name}.lora_a.weight"] = a[own]
                found[f"{name}.lora_b.weight"] = model.from_hub(f"{name}.weight", block[:, own])
                if int(block.count_nonzero()) != int(block[:, own].count_nonzero()):
                    faults.append(f"{KEY}: {key} mixes the adapters of {', '.join(adapted)}")
                if magnitude is not None:
                    part = magnitude[row : row + rows]
                    found[f"{name}.magnitude"] = model.from_hub(f"{name}.weight", part)
            elif int(block.count_nonzero()):
                faults.append(f"{KEY}: holds an adapter for {_kind(name)}, the model has none")
            row += rows
        if magnitude is not None:
            used.add(f"{place}.lora_magnitude_vector")
    for name, layer in experts.layers(model):
        place = PEFT_PREFIX + model.peft_module(name)
        for matrix, own in experts.peft_places(place).items():
            keys = (f"{own}.lora_A.weight", f"{own}.lora_B.weight")
            if layer.adapters and all(key in tensors for key in keys):
                used |= set(keys)
                count = len(getattr(layer, matrix))
                a, b = experts.from_peft(*(tensors[k] for k in keys), count, layer.transposed)
                found[f"{name}.adapters.{matrix}.lora_a.weight"] = a
                found[f"{name}.adapters.{matrix}.lora_b.weight"] = b
    return found | {name: tensor for name, tensor in tensors.items() if name not in used}


def _differences(own: dict[str, nn.Parameter], tensors: dict[str, torch.Tensor]) -> list[str]:
    """One line per kind of layer that only one of the two has, or that has another rank."""
    missing = {_kind(name) for name in own.keys() - tensors.keys()}
    surplus = {_kind(name) for name in tensors.keys() - own.keys()}
    faults = [f"{KEY}: holds nothing for the model's {kind}" for kind in sorted(missing)]
    faults += [f"{KEY}: holds {kind}, the model has none" for kind in sorted(surplus)]
    shapes = {
        _kind(name): (list(tensors[name].shape), list(parameter.shape))
        for name, parameter in own.items()
        if name in tensors and tensors[name].shape != parameter.shape
    }
    return faults + [
        f"{KEY}: {kind} has shape {theirs}, the model's {ours} (model.lora_rank?)"
        for kind, (theirs, ours) in sorted(shapes.items())
    ]


def _kind(name: str) -> str:
    """A name without its layer's number."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
