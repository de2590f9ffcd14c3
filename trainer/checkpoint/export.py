"""The finished model as a Hugging Face folder, and its adapter as PEFT reads it."""

import math
import shutil
from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from runspec import files, publish
from runspec.files import patient_json
from runspec.storage import patiently
from runspec.weights import CHAT_TEMPLATES, OTHER_NAME
from trainer.checkpoint import adapter, weights
from trainer.checkpoint.ending import GENERATION, generation_settings, name_answer_end
from trainer.config import TrainConfig
from trainer.data.prepared import is_text
from trainer.data.tokenizers import template_text, write_new_tokens
from trainer.layers import experts, linear, nf4
from trainer.layers.adapters import lora
from trainer.layers.linear import AdaptedLinear
from trainer.model import PEFT_PREFIX, SCORE, AdapterKind, plain_name
from trainer.models.build import Model
from trainer.parallel.world import World
from trainer.sharded import full_tensor, gathered, local, near

MAX_SHARD_BYTES = 4 * 2**30
TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.json",
    "merges.txt",
    f"{CHAT_TEMPLATES}/*",
)
# Files of a model folder, besides weights and tokenizer, that are right for the trained model too.
COPIED = (
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

    Files have at most 4 GiB (or one tensor). As many ranks as there are files write one each at a
    time. Matrices are merged and gathered one by one, of experts one of one expert: a rank needs
    the memory of the largest one beside the weights, whatever a layer's experts take. For an
    adapter over a quantised base see `linear.merged`. The adapter alone is in `adapter/`; with
    `save_adapter_weights_only` the merged weights are left out.
    """
    final = config.output_dir / files.EXPORT
    temporary = publish.hidden(final)
    world.on_main(lambda: _prepare(final, config, model))
    if not config.save_adapter_weights_only:
        write_model(model, config, temporary, world)
    if model.module.adapter is not None:
        write_adapter(model.module.adapter, model, config, temporary / files.ADAPTER, world)
        if lora.is_unreadable(model.module):
            world.say(
                f"note: PEFT 0.21 does not load {files.EXPORT}/{files.ADAPTER}: it takes layers "
                "named gate_proj, up_proj and down_proj for experts; take the merged model, or "
                "leave these out of model.lora_modules"
            )
    world.on_main(lambda: publish.finish(temporary, final, "replace", flush=True))
    return final


def _prepare(final: Path, config: TrainConfig, model: Model) -> None:
    temporary = publish.begin(final, alone=True)
    # It may come from another folder than the model.
    tokenizer = Path(str(config.tokenizer.get("path") or config.model_folder))
    if not (tokenizer / "tokenizer.json").is_file():
        tokenizer = config.model_folder
    for source, patterns in [(tokenizer, TOKENIZER), (config.model_folder, COPIED)]:
        for path in (path for pattern in patterns for path in source.glob(pattern)):
            _copy(path, (temporary / path.relative_to(source)).parent)
    if template := config.tokenizer.get("chat_template"):
        files.write_text(temporary / "chat_template.jinja", template_text(str(template)))
        # It rendered everything; those beside it would be chosen for tools.
        shutil.rmtree(temporary / CHAT_TEMPLATES, ignore_errors=True)
    write_new_tokens(config.tokenizer, temporary)
    settings = patient_json(temporary / "config.json") or {}
    if config.tokenizer.get("new_tokens"):
        text = settings.get("text_config") or settings
        text["vocab_size"] = model.module.vocab_size
    settings.pop(OTHER_NAME, None)
    key = "torch_dtype" if "torch_dtype" in settings else "dtype"
    settings[key] = str(model.dtype).removeprefix("torch.")
    if model.module.score_head is not None:
        from trainer.checkpoint import classifier  # a rank is to start fast

        settings |= classifier.settings(model.module.config, config.model_folder)
        classifier.set_pad_token(temporary)
    files.write_json(temporary / "config.json", settings)
    if not (model.module.score_head is not None or is_text(config.dataset)):
        name_answer_end(temporary, config.tokenizer.get("chat_template_kwargs"))


def _copy(path: Path, folder: Path) -> None:
    """Copy a file into a folder, tried again while the storage cannot be read."""
    folder.mkdir(exist_ok=True)
    patiently(lambda source: shutil.copyfile(source, folder / path.name), path)


class Step(NamedTuple):
    """A matrix that is gathered at once: all or some rows of a tensor of the hub."""

    # The plain name of `parameter`; None if another part of the folder's model has it.
    name: str | None
    parameter: torch.Tensor
    # Of the parameter; the first number is that of an expert. () is all.
    place: tuple[Any, ...] = ()


def steps_of(model: Model, name: str, parameter: torch.Tensor) -> list[Step]:
    """How a parameter is gathered: experts one by one."""
    owner, _, last = name.rpartition(".")
    if last in experts.MATRICES and hasattr(model.module.get_submodule(owner), "transposed"):
        return [Step(name, parameter, (expert,)) for expert in range(parameter.shape[0])]
    return [Step(name, parameter)]


@torch.no_grad()
def gather(model: Model, layers: dict[str, torch.nn.Module], step: Step) -> torch.Tensor:
    """The matrix of a step, whole and with its adapter merged; all ranks call this together.

    Each rank merges its own part before it is gathered.
    """
    owner, _, last = str(step.name).rpartition(".")
    layer = layers[owner]
    if step.place and last in experts.MATRICES:
        expert, *rows = step.place
        return experts.merged(layer, last, expert, model.dtype)[tuple(rows)]
    if isinstance(layer, AdaptedLinear) or nf4.is_packed(step.parameter):
        whole = linear.merged(layer, last, model.dtype)
    else:
        whole = in_dtype(step.parameter.detach(), model.dtype)
    return whole[step.place] if step.place else whole


def in_dtype(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A whole parameter; what is sharded is gathered in `dtype`, whatever its master weights are.

    What is on every rank, such as a buffer, keeps its own.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    return gathered(parameter, near(parameter, local(parameter)).to(dtype))


def layers_of(model: Model) -> dict[str, torch.nn.Module]:
    """The modules by their plain names."""
    return {plain_name(name): m for name, m in model.module.named_modules()}


def write_model(model: Model, config: TrainConfig, folder: Path, world: World) -> None:
    """Write the whole weights as on the Hub; all ranks call this together."""
    layers, pieces = layers_of(model), weights.hub_pieces(model.module)
    parts_of = {k: v for k, v in weights.file_tensors(model.module).items() if k is not None}
    # By tensor of the hub, how its rows are gathered, in their order.
    steps = {
        key: [step for name, parameter in parts for step in steps_of(model, name, parameter)]
        for key, parts in parts_of.items()
    }
    steps |= {key: [Step(*piece)] for key, piece in pieces.items()}
    shapes = {key: weights.hub_shape(parts) for key, parts in parts_of.items()}
    shapes |= {key: piece.shape for key, piece in pieces.items()}
    source, carried = None, model.module.carried_tensors
    if carried:
        source = weights.SafetensorsSource.open(config.checkpointer)
        shapes |= {key: source.shapes[key] for key in carried}
        steps |= {key: [Step(None, torch.empty(0))] for key in carried}
    # Biases of routers stay in fp32: bf16 would round them.
    held = {
        key: buffer.dtype
        for name, buffer in model.module.held_buffers().items()
        if (key := weights.file_of(model.module, name)) is not None
    }
    dtypes = dict.fromkeys(shapes, model.dtype) | held
    split = split_state_dict_into_shards_factory(
        shapes,
        get_storage_size=lambda shape: math.prod(shape) * model.dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=MAX_SHARD_BYTES,
    )

    def content(key: str, step: Step) -> Callable[[bool], torch.Tensor | None]:
        def rows(keep: bool) -> torch.Tensor | None:
            if step.name is None:
                return source.tensor(key).to(model.dtype) if keep and source else None
            tensor = gather(model, layers, step)
            return tensor.to(dtypes[key]).cpu() if keep else None

        return rows

    def opened(name: str, keys: list[str]) -> weights.SafetensorsWriter:
        return weights.SafetensorsWriter(folder / name, {k: shapes[k] for k in keys}, dtypes)

    waiting = [
        _File(
            partial(opened, name, keys),
            [content(key, step) for key in keys for step in steps[key]],
        )
        for name, keys in split.filename_to_tensors.items()
    ]
    # Spread over the nodes.
    count = min(world.size, len(waiting))
    writers = [number * world.size // count for number in range(count)]
    for first in range(0, len(waiting), count):
        _write_files(dict(zip(writers, waiting[first : first + count], strict=False)), world)
    if split.is_sharded:
        listing = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        world.on_main(lambda: files.write_json(folder / "model.safetensors.index.json", listing))


class _File(NamedTuple):
    """open: makes its writer. rows: what fills it, by calls of all ranks; only one keeps it."""

    open: Callable[[], weights.SafetensorsWriter]
    rows: list[Callable[[bool], torch.Tensor | None]]


def _write_files(at_once: dict[int, _File], world: World) -> None:
    """Write a file on each of some ranks, by rank, at the same time: a matrix of each in turn."""
    own = at_once.get(world.rank)
    file = world.on_all(lambda: None if own is None else own.open())
    for turns in zip_longest(*(each.rows for each in at_once.values())):
        mine = None
        for rank, rows in zip(at_once, turns, strict=True):
            part = None if rows is None else rows(rank == world.rank)
            mine = part if rank == world.rank else mine
        if file is not None and mine is not None:
            file.add(mine)
    world.on_all(lambda: None if file is None else file.close())


@torch.no_grad()
def write_adapter(
    kind: AdapterKind, model: Model, config: TrainConfig, folder: Path, world: World
) -> None:
    """Write the adapter as PEFT reads it; all ranks call this together."""
    hub = weights.hub_tensors(model.module)
    tensors, fields = kind.to_peft(model.module, hub, model.dtype)
    tensors |= {
        key: full_tensor(parameter.detach()).to(model.dtype).cpu()
        for key, (_, parameter) in adapter.saved_of(model.module).items()
    }
    if saved := [key.split(".")[-2] for key in adapter.saved_of(model.module)]:
        fields = {**fields, "modules_to_save": saved}
        if model.module.is_tied:
            # Without it PEFT would leave the output head as it was; and it wants the weight twice.
            fields["ensure_weight_tying"] = True
            (table,) = adapter.saved_of(model.module)
            tensors[adapter.TIED_HEAD] = tensors[table].clone()
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
        whole = folder.parent
        own = [path for pattern in TOKENIZER for path in whole.glob(pattern)]
        if any(_differs(path, config.model_folder / path.relative_to(whole)) for path in own):
            for path in own:
                _copy(path, (folder / path.relative_to(whole)).parent)
        if model.module.score_head is None and (ends := generation_settings(whole)):
            files.write_json(folder / GENERATION, ends)
        save_file(tensors, folder / adapter.FILE, metadata={"format": "pt"})
        files.write_json(folder / adapter.SETTINGS, settings)

    world.on_main(write)


def _differs(one: Path, other: Path) -> bool:
    return not other.is_file() or one.read_bytes() != other.read_bytes()
