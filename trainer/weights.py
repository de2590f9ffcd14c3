"""Weights between Hugging Face safetensors and the ranks' shards, one tensor at a time."""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from trainer import families
from trainer.errors import ConfigError
from trainer.parallel import local_part

# Another model's folder differs in every layer, and a few lines tell it.
SHOWN_TENSORS = 8
ADAPTER_PARTS = (".lora_a.weight", ".lora_b.weight")


def plain_name(name: str) -> str:
    """A parameter's name without the part that activation checkpointing adds."""
    return name.replace("_checkpoint_wrapped_module.", "")


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters by their plain torchtune names."""
    for name, parameter in module.named_parameters():
        yield plain_name(name), parameter


def is_adapter(name: str) -> bool:
    """True for a parameter that LoRA adds to the base model."""
    return name.endswith(ADAPTER_PARTS)


@dataclass(frozen=True)
class SafetensorsSource:
    """Which file of a model folder holds which tensor, and each tensor's shape."""

    files: dict[str, Path]
    shapes: dict[str, tuple[int, ...]]

    @classmethod
    def open(cls, checkpointer: dict[str, Any]) -> "SafetensorsSource":
        """Read the headers of the files that a `checkpointer` block names.

        Args:
            checkpointer: checkpoint_dir, and optionally checkpoint_files (a list, or
                filename_format with max_filename); without it all *.safetensors count.

        Raises:
            ConfigError: a file is missing or no safetensors.
        """
        folder = Path(checkpointer["checkpoint_dir"])
        if not folder.is_dir():
            raise ConfigError(
                f"checkpointer.checkpoint_dir: {folder} does not exist; download the model first"
            )
        files: dict[str, Path] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        faults = []
        for path in _listed_files(checkpointer, folder):
            try:
                with safe_open(path, framework="pt") as file:
                    for key in file.keys():  # noqa: SIM118 (not a dict)
                        files[key] = path
                        shapes[key] = tuple(file.get_slice(key).get_shape())
            except FileNotFoundError:
                faults.append(f"checkpointer.checkpoint_files: {path} is missing")
            except (SafetensorError, OSError) as error:
                faults.append(f"checkpointer.checkpoint_files: {path} is damaged: {error}")
        if faults:
            raise ConfigError(*faults)
        return cls(files, shapes)

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor once, (Hugging Face name, tensor), file by file."""
        for path in sorted(set(self.files.values())):
            with safe_open(path, framework="pt") as file:
                for key in sorted(k for k, where in self.files.items() if where == path):
                    yield key, file.get_tensor(key)


def _listed_files(checkpointer: dict[str, Any], folder: Path) -> list[Path]:
    listed = checkpointer.get("checkpoint_files")
    if isinstance(listed, dict):
        last = str(listed["max_filename"])
        names = [
            listed["filename_format"].format(str(i).zfill(len(last)), last)
            for i in range(1, int(last) + 1)
        ]
    elif listed:
        names = [str(name) for name in listed]
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise ConfigError(f"checkpointer.checkpoint_dir: {folder} holds no *.safetensors file")
    for name in names:
        if not name.endswith(".safetensors"):
            raise ConfigError(
                f"checkpointer.checkpoint_files: {name} is no safetensors file; pickled weights "
                "are not read, give the model's Hugging Face folder with *.safetensors"
            )
    return [folder / name for name in names]


def mismatches(
    module: nn.Module, source: SafetensorsSource, folder: Path, hf_config: dict[str, Any]
) -> list[str]:
    """Every tensor that is missing, too many, or of another shape than the model's."""
    family = families.of(hf_config)
    wanted: dict[str, tuple[int, ...]] = {}
    faults = []
    for name, parameter in named_parameters(module):
        if is_adapter(name):
            continue
        key = family.hf_name(name)
        if key is None:
            faults.append(f"{folder}: holds nothing for the model's {name}")
        else:
            rows = wanted[key][0] if key in wanted else 0
            wanted[key] = (rows + parameter.shape[0], *parameter.shape[1:])
    for key in sorted(wanted.keys() - source.shapes.keys()):
        faults.append(f"{folder}: tensor {key} is missing")
    for key in sorted(source.shapes.keys() - wanted.keys()):
        if not _is_redundant(key, wanted):
            faults.append(f"{folder}: tensor {key} belongs to no part of the model")
    for key in sorted(wanted.keys() & source.shapes.keys()):
        if wanted[key] != source.shapes[key]:
            faults.append(
                f"{folder}: tensor {key} has shape {list(source.shapes[key])}, "
                f"the model wants {list(wanted[key])}"
            )
    more = len(faults) - SHOWN_TENSORS
    return faults if more <= 0 else [*faults[:-more], f"{folder}: {more} more tensors do not fit"]


def _is_redundant(key: str, wanted: dict[str, Any]) -> bool:
    # A tied model may store its embedding twice, and old folders store rotary tables.
    return key.endswith("rotary_emb.inv_freq") or (
        key == "lm_head.weight" and key not in wanted and "model.embed_tokens.weight" in wanted
    )


@torch.no_grad()
def load(module: nn.Module, source: SafetensorsSource, hf_config: dict[str, Any]) -> None:
    """Fill the base weights of `module`; each rank copies its own part of each tensor.

    At most one whole tensor is in memory at a time.
    """
    family = families.of(hf_config)
    parameters = {n: p for n, p in named_parameters(module) if not is_adapter(n)}
    for key, tensor in source.read():
        # A tied model may store its output too, which is no parameter of its own.
        names = [name for name in family.parts(key) if name in parameters]
        parts = tensor.split([parameters[name].shape[0] for name in names]) if names else ()
        for name, part in zip(names, parts, strict=True):
            full = family.to_tune(name, part, hf_config).to(parameters[name].dtype)
            _fill(parameters[name], full)


@torch.no_grad()
def initialise_adapter(module: nn.Module, seed: int) -> None:
    """Fill LoRA's A by Kaiming uniform and B by zeros, the same on any number of ranks.

    Source: Hu et al. 2021 (arXiv 2106.09685); each A has a generator of its own, seeded by
    `seed` and its name.
    """
    for name, parameter in named_parameters(module):
        if not is_adapter(name):
            continue
        full = torch.zeros(parameter.shape, dtype=torch.float32)
        if name.endswith(ADAPTER_PARTS[0]):
            digest = hashlib.sha256(json.dumps([seed, name]).encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            bound = 1 / math.sqrt(parameter.shape[1])
            full.uniform_(-bound, bound, generator=generator)
        _fill(parameter, full.to(parameter.dtype))


def _fill(parameter: nn.Parameter, full: torch.Tensor) -> None:
    part = local_part(parameter, full)
    target = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    target.copy_(part)
