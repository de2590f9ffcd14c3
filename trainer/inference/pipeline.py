"""A model of transformers on one device, or its layers spread over all ranks.

Spread by layers (transformers' pipeline parallelism) each rank reads and holds its own layers, and
every rank gets the whole outputs, which are the same as on one device. The ranks compute one after
the other: this is for models that are larger than a GPU, not for speed.
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runspec.storage import patiently
from runspec.weights import parameter_count, ranks_for
from trainer.errors import ConfigError
from trainer.models.folder_class import has_text_class, load_config
from trainer.parallel.world import TIMEOUT


def ranks_needed(folder: Path, number_bytes: int, device: torch.device) -> int:
    """Over how many ranks a model has to be spread: 1, or all of this node.

    Raises:
        ConfigError: it does not fit into the GPUs of all ranks, or these are on several nodes.
    """
    if device.type != "cuda":
        return 1
    memory = torch.cuda.get_device_properties(device).total_memory
    count, size = ranks_for(parameter_count(folder), number_bytes, memory), _size("WORLD_SIZE")
    if count == 1:
        return 1
    if size != _size("LOCAL_WORLD_SIZE"):
        raise ConfigError(
            f"{folder}: needs {count} GPUs, and is spread over those of one node: use --nodes 1"
        )
    if count > size:
        raise ConfigError(
            f"{folder}: needs {count} GPUs of {memory / 2**30:.0f} GiB, and there are {size}: "
            f"use --gpus-per-node {count}, or larger GPUs"
        )
    return size


def load(
    kind: Any, folder: Path, dtype: torch.dtype | str, device: torch.device, ranks: int, **more: Any
) -> Any:
    """A model by a class such as AutoModelForCausalLM, on `device`; all `ranks` call this together.

    Raises:
        ConfigError: the model's class cannot be spread, or has fewer layers than ranks.
        OSError, ValueError: transformers cannot load it.
    """
    if ranks == 1:
        return _loaded(kind, folder, dtype=dtype, **more).to(device).eval()
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.distributed import DistributedConfig

    whole = load_config(folder)
    config = whole.get_text_config()
    if kind is AutoModelForImageTextToText:
        # transformers spreads no such class: its text part answers, if that has its own.
        if not has_text_class(whole):
            raise ConfigError(
                f"{folder}: transformers cannot spread {whole.model_type}, a model of text and "
                f"images, over {ranks} ranks; use larger GPUs, or cookbook serve with vLLM"
            )
        kind = AutoModelForCausalLM
    layers = int(getattr(config, "num_hidden_layers", 0))
    if not getattr(config, "base_model_pp_plan", None) or layers < ranks:
        raise ConfigError(
            f"{folder}: transformers cannot spread the {layers} layers of {config.model_type} over "
            f"{ranks} ranks; use larger GPUs, or cookbook serve with vLLM"
        )
    init_process_group(device, ranks)
    spread = DistributedConfig(pp_size=ranks)
    return _loaded(kind, folder, dtype=dtype, distributed_config=spread, **more).eval()


def _loaded(kind: Any, folder: Path, **options: Any) -> Any:
    return patiently(lambda path: kind.from_pretrained(str(path), **options), folder)


def generate_options(model: Any, ranks: int) -> dict[str, Any]:
    """What `generate` of a spread model is given in addition, anew for each call."""
    if ranks == 1:
        return {}
    config = model.config.get_text_config()
    if any("linear" in str(kind) for kind in getattr(config, "layer_types", None) or ()):
        # Its states are asked of layers that other ranks have: each token computes the text again.
        return {"use_cache": False}
    from trainer.inference.stage_cache import StageCache

    return {"past_key_values": StageCache(config=config)}


def from_first_rank(value: Any, ranks: int) -> Any:
    """Rank 0's value on every rank of a spread model; all of them call this together."""
    if ranks == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def init_process_group(device: torch.device, ranks: int) -> None:
    """Join the process group that torchrun describes, if a model is spread."""
    if ranks > 1 and not dist.is_initialized():
        backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT)


def _size(name: str) -> int:
    return int(os.environ.get(name, 1))
