"""The finished model as a Hugging Face folder, and its adapter as PEFT reads it."""

import math
import shutil
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file

from runspec import files
from trainer.config import TrainConfig
from trainer.data.tokenizers import template_text
from trainer.layers import experts, linear, nf4
from trainer.layers.adapters.base import PEFT_PREFIX, AdaptedLinear, AdapterKind
from trainer.models.build import Model
from trainer.models.decoder import SCORE
from trainer.parallel.sharded import full_tensor
from trainer.parallel.world import World
from trainer.storage import adapter, weights

MAX_SHARD_BYTES = 4 * 2**30
TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.json",
    "merges.txt",
)
# Files of a model folder, besides the weights, that are right for the trained model too.
COPIED = (
    *TOKENIZER,
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    # What an `auto_map` in config.json or tokenizer_config.json names.
    "configuration_*.py",
    "modeling_*.py",
    "tokenization_*.py",
)


def export(model: Model, config: TrainConfig, world: World) -> Path:
    """Write <output_dir>/export and return it; all ranks call this together.

    Tensors are gathered and written one at a time; rank 0 writes, in files of at most 4 GiB (or
    one tensor). An adapter is merged (see `linear.merged` for a quantised base), and by itself it
    lies in `adapter/`; with `save_adapter_weights_only` the merged weights are left out.
    """
    final = config.output_dir / files.EXPORT
    temporary = config.output_dir / f".tmp_{files.EXPORT}"
    world.on_main(lambda: _prepare(temporary, config, model))
    if not config.save_adapter_weights_only:
        _write_model(model, config, temporary, world)
    if model.module.adapter is not None:
        _write_adapter(model.module.adapter, model, config, temporary / files.ADAPTER, world)
    world.on_main(lambda: _commit(temporary, final))
    return final


def _prepare(temporary: Path, config: TrainConfig, model: Model) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    # From scratch a tokenizer may come from another folder than config.json.
    tokenizer = Path(str(config.tokenizer.get("path") or config.model_folder))
    copied = [] if config.reads_weights else [(tokenizer, TOKENIZER)]
    for source, patterns in [*copied, (config.model_folder, COPIED)]:
        for path in (path for pattern in patterns for path in source.glob(pattern)):
            shutil.copyfile(path, temporary / path.name)
    if template := config.tokenizer.get("chat_template"):
        files.write_text(temporary / "chat_template.jinja", template_text(str(template)))
    settings = files.read_json_or_none(temporary / "config.json") or {}
    key = "torch_dtype" if "torch_dtype" in settings else "dtype"
    settings[key] = str(model.dtype).removeprefix("torch.")
    if model.module.score_head is not None:
        from trainer.storage import classifier  # a rank is to start fast

        settings |= classifier.settings(model.module.config, config.model_folder)
        classifier.set_pad_token(temporary)
    files.write_json(temporary / "config.json", settings)


def _commit(temporary: Path, final: Path) -> None:
    for path in [*temporary.rglob("*"), temporary]:
        files.fsync_path(path)
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    files.fsync_path(final.parent)


def _write_model(model: Model, config: TrainConfig, folder: Path, world: World) -> None:
    module = model.module
    parts_of, layers = weights.hub_tensors(module), _layers(model)
    shapes = {key: weights.hub_shape(parts) for key, parts in parts_of.items() if key is not None}
    pieces, whole = weights.hub_pieces(model.module), ("", torch.empty(0))
    shapes |= {key: piece.shape for key, piece in pieces.items()}
    carried = model.module.carried_tensors
    if carried:
        source = weights.SafetensorsSource.open(config.checkpointer)
        shapes |= {key: source.shapes[key] for key in carried}
    # Biases of routers stay in fp32: bf16 would round them.
    held = {
        key: buffer.dtype
        for name, buffer in module.held_buffers().items()
        if (key := module.hub_name(name)) is not None
    }
    dtypes = dict.fromkeys(shapes, model.dtype) | held
    split = split_state_dict_into_shards_factory(
        shapes,
        get_storage_size=lambda shape: math.prod(shape) * model.dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=MAX_SHARD_BYTES,
    )
    for name, keys in split.filename_to_tensors.items():
        own = {key: shapes[key] for key in keys}
        file = world.on_main(partial(weights.SafetensorsWriter, folder / name, own, dtypes))
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
        world.on_main(partial(_close, file))
    if split.is_sharded:
        listing = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        world.on_main(lambda: files.write_json(folder / "model.safetensors.index.json", listing))


def _close(file: weights.SafetensorsWriter | None) -> None:
    """Close the file of rank 0; the other ranks have none."""
    if file is not None:
        file.close()


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
    if isinstance(layer, AdaptedLinear) or nf4.is_packed(parameter):
        return linear.merged(layer, last, model.dtype)
    return full_tensor(parameter.detach())


def _layers(model: Model) -> dict[str, torch.nn.Module]:
    return {weights.plain_name(name): m for name, m in model.module.named_modules()}


@torch.no_grad()
def _write_adapter(
    kind: AdapterKind, model: Model, config: TrainConfig, folder: Path, world: World
) -> None:
    hub = weights.hub_tensors(model.module)
    tensors, fields = kind.to_peft(model.module, hub, model.dtype)
    tensors |= {
        key: full_tensor(parameter.detach()).to(model.dtype).cpu()
        for key, (_, parameter) in adapter.saved_of(model.module).items()
    }
    if saved := [key.split(".")[-2] for key in adapter.saved_of(model.module)]:
        fields = {**fields, "modules_to_save": saved}
    settings = {
        "peft_type": kind.declared.peft_type or kind.declared.title.upper(),
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(config.model_folder),
        **fields,
        "inference_mode": True,
    }
    if (head := model.module.score_head) is not None:
        tensors[PEFT_PREFIX + SCORE] = full_tensor(head.weight.detach()).to(model.dtype).cpu()
        saved = [*(settings.get("modules_to_save") or ()), "score"]
        settings |= {"task_type": "SEQ_CLS", "modules_to_save": saved}

    def write() -> None:
        folder.mkdir()
        save_file(tensors, folder / adapter.FILE, metadata={"format": "pt"})
        files.write_json(folder / adapter.SETTINGS, settings)

    world.on_main(write)
