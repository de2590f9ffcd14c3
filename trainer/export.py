"""The finished model as a Hugging Face folder, and its adapter as PEFT reads it."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trainer import lora, nf4, weights
from trainer.compat import DoRALinear, hf_name, tune_to_peft_adapter_weights
from trainer.config import TrainConfig
from trainer.distributed import World
from trainer.files import fsync_path, read_json, write_json
from trainer.models import Model
from trainer.parallel import whole

FOLDER, ADAPTER = "export", "adapter"
MAX_SHARD_BYTES = 4 * 2**30
# What a model folder holds beside the weights and is true of the trained model too.
COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.json",
    "merges.txt",
)


def export(model: Model, config: TrainConfig, world: World) -> Path:
    """Write <output_dir>/export and return it; all ranks call this together.

    Tensors are gathered one at a time, and rank 0 writes them in files of at most 4 GiB (or one
    tensor). LoRA and DoRA are merged (see `lora.merged` for a quantised base), and the adapter by
    itself lies in `adapter/`; with `save_adapter_weights_only` the merged weights are left out.
    """
    final = config.output_dir / FOLDER
    temporary = config.output_dir / f".tmp_{FOLDER}"
    world.on_main(lambda: _prepare(temporary, config.model_folder, model.dtype))
    if not config.save_adapter_weights_only:
        _write_model(model, temporary, world)
    if model.method != "full":
        _write_adapter(model, config, temporary / ADAPTER, world)
    world.on_main(lambda: _commit(temporary, final))
    return final


def _prepare(temporary: Path, source: Path, dtype: torch.dtype) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for pattern in COPIED:
        for path in source.glob(pattern):
            shutil.copyfile(path, temporary / path.name)
    settings = read_json(temporary / "config.json") or {}
    key = "torch_dtype" if "torch_dtype" in settings else "dtype"
    write_json(temporary / "config.json", settings | {key: str(dtype).removeprefix("torch.")})


def _commit(temporary: Path, final: Path) -> None:
    for path in [*temporary.rglob("*"), temporary]:
        fsync_path(path)
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    fsync_path(final.parent)


def _write_model(model: Model, folder: Path, world: World) -> None:
    shards = _plan(model)
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    stream = _hf_tensors(model, world.is_main)
    for name, keys in zip(names, shards, strict=True):
        tensors = dict(next(stream) for _ in keys)
        world.on_main(lambda n=name, t=tensors: save_file(t, folder / n, metadata={"format": "pt"}))
    if len(shards) > 1:
        total = sum(_bytes(model, p) for _, p in _base_parameters(model))
        index = {
            "metadata": {"total_size": total},
            "weight_map": {k: n for n, keys in zip(names, shards, strict=True) for k in keys},
        }
        world.on_main(lambda: write_json(folder / "model.safetensors.index.json", index))


def _base_parameters(model: Model) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for name, parameter in weights.named_parameters(model.module):
        if not weights.is_adapter(name):
            yield name, parameter


def _bytes(model: Model, parameter: torch.nn.Parameter) -> int:
    """The size of a parameter in the export, where nothing is quantised."""
    dtype = model.dtype if nf4.is_packed(parameter) else parameter.dtype
    return nf4.dense_numel(parameter) * dtype.itemsize


def _plan(model: Model) -> list[list[str]]:
    """Hugging Face names by file, in the order in which the tensors are gathered."""
    shards: list[list[str]] = [[]]
    room = MAX_SHARD_BYTES
    for name, parameter in _base_parameters(model):
        size = _bytes(model, parameter)
        if size > room and shards[-1]:
            shards.append([])
            room = MAX_SHARD_BYTES
        shards[-1].append(hf_name(name))
        room -= size
    return shards


@torch.no_grad()
def _hf_tensors(model: Model, keep: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, whole merged tensor on the CPU; an empty one where `keep` is False)."""
    layers = {weights.plain_name(name): m for name, m in model.module.named_modules()}
    for name, parameter in _base_parameters(model):
        layer = layers.get(name.removesuffix(".weight"))
        if isinstance(layer, lora.ADAPTED) or nf4.is_packed(parameter):
            tensor = lora.merged(layer, model.dtype)
        else:
            tensor = whole(parameter.detach())
        if keep:
            converted = weights.to_hf(name, tensor.cpu(), model.hf_config)
            yield hf_name(name), converted.contiguous().clone()
        else:
            yield hf_name(name), torch.empty(0)


@torch.no_grad()
def _write_adapter(model: Model, config: TrainConfig, folder: Path, world: World) -> None:
    parameters = [p for p in weights.named_parameters(model.module) if weights.is_adapter(p[0])]
    tensors = {name: whole(p.detach()).cpu() for name, p in parameters}
    world.on_main(lambda: _save_adapter(model, config, folder, tensors))


def _save_adapter(
    model: Model, config: TrainConfig, folder: Path, tensors: dict[str, torch.Tensor]
) -> None:
    folder.mkdir()
    save_file(
        {
            key: tensor.contiguous()
            for name, own in tensors.items()
            for key, tensor in [_peft_tensor(name, own, model.hf_config)]
        },
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    layers = {
        weights.plain_name(name): layer
        for name, layer in model.module.named_modules()
        if isinstance(layer, lora.ADAPTED)
    }
    first = next(iter(layers.values()))
    targets = {hf_name(f"{name}.weight").split(".")[-2] for name in layers}
    write_json(folder / "adapter_config.json", _peft_config(first, sorted(targets), config))


def _peft_tensor(
    name: str, tensor: torch.Tensor, hf_config: dict[str, Any]
) -> tuple[str, torch.Tensor]:
    """An adapter's tensor by PEFT's name; the rows of q and k in Hugging Face's order."""
    if not name.endswith(".magnitude"):
        converted = tune_to_peft_adapter_weights(
            {name: tensor}, **weights.shape_of_heads(hf_config)
        )
        return next(iter(converted.items()))
    # A magnitude has the rows of B, and torchtune would leave those of q and k in its own order.
    as_b = name.removesuffix("magnitude") + "lora_b.weight"
    key, column = _peft_tensor(as_b, tensor[:, None], hf_config)
    return key.replace("lora_B.weight", "lora_magnitude_vector"), column[:, 0]


def _peft_config(layer: Any, targets: list[str], config: TrainConfig) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(config.model_folder),
        "r": lora.rank(layer),
        "lora_alpha": lora.scaling(layer) * lora.rank(layer),
        "use_dora": isinstance(layer, DoRALinear),
        "lora_dropout": getattr(layer.dropout, "p", 0.0),
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
