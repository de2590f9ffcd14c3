"""The finished model as a Hugging Face folder, and its adapter as PEFT reads it."""

import math
import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file

from runspec import files
from trainer.config import TrainConfig
from trainer.layers import experts, lora, nf4
from trainer.models.build import Model
from trainer.parallel.sharded import full_tensor
from trainer.parallel.world import World
from trainer.storage import adapter as adapters
from trainer.storage import peft_config, weights

MAX_SHARD_BYTES = 4 * 2**30
# By module of transformers' class: its adapter's rank, and the factor of B A.
Scales = dict[str, tuple[int, float]]
# Files of a model folder, besides the weights, that are right for the trained model too.
COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "preprocessor_config.json",
    "processor_config.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.json",
    "merges.txt",
    # What an `auto_map` in config.json or tokenizer_config.json names.
    "configuration_*.py",
    "modeling_*.py",
    "tokenization_*.py",
)


def export(model: Model, config: TrainConfig, world: World) -> Path:
    """Write <output_dir>/export and return it; all ranks call this together.

    Tensors are gathered and written one at a time; rank 0 writes, in files of at most 4 GiB (or
    one tensor). LoRA and DoRA are merged (see `lora.merged` for a quantised base), and the adapter
    by itself lies in `adapter/`; with `save_adapter_weights_only` the merged weights are left out.
    """
    final = config.output_dir / files.EXPORT
    temporary = config.output_dir / f".tmp_{files.EXPORT}"
    world.on_main(lambda: _prepare(temporary, config.model_folder, model.dtype))
    if not config.save_adapter_weights_only:
        _write_model(model, config, temporary, world)
    if model.method != "full":
        _write_adapter(model, config, temporary / files.ADAPTER, world)
    world.on_main(lambda: _commit(temporary, final))
    return final


def _prepare(temporary: Path, source: Path, dtype: torch.dtype) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for pattern in COPIED:
        for path in source.glob(pattern):
            shutil.copyfile(path, temporary / path.name)
    settings = files.read_json_or_none(temporary / "config.json") or {}
    key = "torch_dtype" if "torch_dtype" in settings else "dtype"
    files.write_json(temporary / "config.json", settings | {key: str(dtype).removeprefix("torch.")})


def _commit(temporary: Path, final: Path) -> None:
    for path in [*temporary.rglob("*"), temporary]:
        files.fsync_path(path)
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    files.fsync_path(final.parent)


def _write_model(model: Model, config: TrainConfig, folder: Path, world: World) -> None:
    module = model.module
    parts_of, layers = weights.hub_tensors(module), _layers(model)
    shapes = {key: weights.hub_shape(parts) for key, parts in parts_of.items()}
    pieces, whole = weights.hub_pieces(model.module), ("", torch.empty(0))
    shapes |= {key: piece.shape for key, piece in pieces.items()}
    carried = model.module.carried_tensors
    if carried:
        source = weights.SafetensorsSource.open(config.checkpointer)
        shapes |= {key: source.shapes[key] for key in carried}
    # Biases of routers stay in fp32: bf16 would round them.
    held = {module.hub_name(name): b.dtype for name, b in module.held_buffers().items()}
    dtypes = dict.fromkeys(shapes, model.dtype) | held
    split = split_state_dict_into_shards_factory(
        shapes,
        get_storage_size=lambda shape: math.prod(shape) * model.dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=MAX_SHARD_BYTES,
    )
    for name, keys in split.filename_to_tensors.items():
        own = {key: shapes[key] for key in keys}
        file = world.on_main(lambda n=name, s=own: weights.SafetensorsWriter(folder / n, s, dtypes))
        for key in keys:
            if key in pieces:
                name, parameter, index = pieces[key]
                if whole[0] != name:
                    # All its pieces come one after another.
                    whole = name, _whole(model, layers, name, parameter)
                tensor = whole[1][index].to(model.dtype).cpu()
            elif key in parts_of:
                tensor = _merged(model, layers, parts_of[key], dtypes[key], keep=world.is_main)
            elif file is not None:
                tensor = source.tensor(key).to(model.dtype)
            if file is not None:
                file.add(tensor)
        world.on_main(lambda f=file: f.close())
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        world.on_main(lambda: files.write_json(folder / "model.safetensors.index.json", index))


@torch.no_grad()
def _merged(
    model: Model,
    layers: dict[str, torch.nn.Module],
    parts: weights.Parts,
    dtype: torch.dtype,
    keep: bool,
) -> torch.Tensor:
    """A tensor of the hub by its parts, whole and on the CPU; an empty one if `keep` is False."""
    rows = []
    for name, parameter in parts:
        tensor = _whole(model, layers, name, parameter)
        if keep:
            rows.append(model.module.to_hub(name, tensor.to(dtype).cpu()))
    return torch.cat(rows) if keep else torch.empty(0)


@torch.no_grad()
def _whole(
    model: Model, layers: dict[str, torch.nn.Module], name: str, parameter: torch.Tensor
) -> torch.Tensor:
    """A base parameter, whole and with its adapter merged; all ranks call this together."""
    owner, _, last = name.rpartition(".")
    layer = layers[owner]
    if last in experts.MATRICES and hasattr(layer, "transposed"):
        return experts.merged(layer, last, model.dtype)
    if (last == "weight" and isinstance(layer, lora.AdaptedLinear)) or nf4.is_packed(parameter):
        return lora.merged(layer, model.dtype)
    return full_tensor(parameter.detach())


def _layers(model: Model) -> dict[str, torch.nn.Module]:
    return {weights.plain_name(name): m for name, m in model.module.named_modules()}


@torch.no_grad()
def _write_adapter(model: Model, config: TrainConfig, folder: Path, world: World) -> None:
    tensors, scales = _peft_tensors(model)
    of_experts, expert_scales = _expert_tensors(model)
    settings = _peft_config(model, scales, expert_scales, config)
    tensors |= of_experts

    def write() -> None:
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        files.write_json(folder / "adapter_config.json", settings)

    world.on_main(write)


def _peft_tensors(model: Model) -> tuple[dict[str, torch.Tensor], Scales]:
    """PEFT's tensors by name, and the rank and factor of each module that has an adapter.

    If one tensor of the hub holds the rows of several layers, their adapters become one: the A's
    one below the other, and the B's as the blocks of a block-diagonal B. Rows without an adapter
    have zeros in it, and in DoRA the norm that they have as their magnitude.
    """
    decoder, layers = model.module, _layers(model)
    tensors, scales = {}, {}
    for key, parts in weights.hub_tensors(decoder).items():
        own = {name: layers.get(name.removesuffix(".weight")) for name, _ in parts}
        adapted = [layer for layer in own.values() if isinstance(layer, lora.AdaptedLinear)]
        if not adapted:
            continue
        module = decoder.peft_name(key).removesuffix(".weight")
        place = adapters.PEFT_PREFIX + module
        a = torch.cat([full_tensor(layer.lora_a.weight).cpu() for layer in adapted])
        b = torch.zeros(sum(p.shape[0] for _, p in parts), len(a), dtype=a.dtype)
        row = column = 0
        for name, parameter in parts:
            if own[name] in adapted:
                block = full_tensor(own[name].lora_b.weight).cpu()
                end = row + block.shape[0], column + block.shape[1]
                b[row : end[0], column : end[1]] = decoder.to_hub(name, block)
                column = end[1]
            row += parameter.shape[0]
        tensors[f"{place}.lora_A.weight"] = a.to(model.dtype)
        tensors[f"{place}.lora_B.weight"] = b.to(model.dtype)
        if adapted[0].magnitude is not None:
            magnitudes = [
                decoder.to_hub(name, _magnitude(layer, model.dtype)) for name, layer in own.items()
            ]
            tensors[f"{place}.lora_magnitude_vector"] = torch.cat(magnitudes)
        scales[module] = len(a), adapted[0].scaling
    return tensors, scales


def _expert_tensors(model: Model) -> tuple[dict[str, torch.Tensor], Scales]:
    """The same of the experts' adapters; a module is one of their matrices."""
    tensors, scales = {}, {}
    for name, layer in experts.layers(model.module):
        if not layer.adapters:
            continue
        module = model.module.peft_module(weights.plain_name(name))
        for matrix, place in experts.peft_places(f"{adapters.PEFT_PREFIX}{module}").items():
            parts = experts.adapter_tensors(layer, matrix)
            a, b = experts.to_peft(*(part.cpu() for part in parts), layer.transposed)
            tensors[f"{place}.lora_A.weight"] = a.to(model.dtype)
            tensors[f"{place}.lora_B.weight"] = b.to(model.dtype)
            scales[f"{module}.{matrix}"] = layer.rank, layer.scaling
    return tensors, scales


def _magnitude(layer: torch.nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """DoRA's magnitude of a layer's rows, [out]; for a layer without DoRA the norms of its rows."""
    if isinstance(layer, lora.AdaptedLinear):
        return full_tensor(layer.magnitude).cpu()
    return lora.row_norms(lora.merged(layer, dtype), quantised=False).to(dtype).cpu()


def _peft_config(
    model: Model, scales: Scales, expert_scales: Scales, config: TrainConfig
) -> dict[str, Any]:
    layer = lora.adapted_layers(model.module)[0]
    # Other parts of a model of several may have layers with the same last names.
    whole = bool(model.module.carried_tensors)
    targets = scales if whole else sorted({name.rpartition(".")[2] for name in scales})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(config.model_folder),
        **peft_config.fields(scales | expert_scales, layer.rank, layer.use_rslora),
        "use_dora": "DoRA" in model.method,
        "lora_dropout": getattr(getattr(layer, "dropout", None), "p", 0.0),
        "target_modules": list(targets) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    if expert_scales:
        kinds = (".".join(name.split(".")[-3:]) for name in expert_scales)
        settings["target_parameters"] = list(dict.fromkeys(kinds))
    return settings
