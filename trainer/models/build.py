"""The model: from its config block to the meta device, over the ranks, filled from safetensors."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runspec import tokens
from runspec.adapters import LORA
from runspec.description import family_of
from runspec.keys.model import TRANSFORMERS
from runspec.keys.train import ModelSpec
from trainer.checkpoint import weights
from trainer.checkpoint.load import load
from trainer.config import instantiate
from trainer.errors import ConfigError
from trainer.layers import attention, fp8, linear, nf4
from trainer.layers.adapters import base as adapters
from trainer.model import AdapterKind, Decoder
from trainer.models.faults import family_faults, frozen_by_name
from trainer.models.faults import layout_faults as layout_faults
from trainer.parallel import activations, fsdp, tensor_parallel
from trainer.parallel.world import World

# RMSNorm computes in fp32 with a bf16 weight; compiled, that is one kernel all the same.
warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# (number of tokens, number of positions that the model knows) -> what in the data it cannot take.
DataFaults = Callable[[int, int], list[str]]


@dataclass(frozen=True)
class Model:
    """A model ready to train, and what the export must know about it."""

    module: Decoder
    # full, or an adapter's title; see trainer.layers.adapters.base.
    method: str
    # What it computes and is exported in; with master weights parameters are kept in fp32.
    dtype: torch.dtype

    # Every step asks for them, and to go through all modules takes milliseconds.
    @cached_property
    def trainable(self) -> list[nn.Parameter]:
        """The parameters that the optimizer changes."""
        return [p for p in self.module.parameters() if p.requires_grad]

    def parameter_counts(self) -> tuple[int, int]:
        """(trainable, all) parameters of the whole model, not of this rank's part.

        A quantised weight counts as the weights that it represents.
        """
        return sum(p.numel() for p in self.trainable), sum(
            nf4.dense_numel(p) for p in self.module.parameters()
        )


def build(spec: ModelSpec, world: World, data_faults: DataFaults | None = None) -> Model:
    """Build, shard and fill the model that `spec` names.

    Every rank has only its own part of the weights in memory.

    Raises:
        ConfigError: the model folder is missing, incomplete, or holds another model.
    """
    world.on_all(lambda: _check_dtypes(spec, world.device))
    source = world.from_main(lambda: source_of(spec))
    source, module = world.on_all(lambda: fitting(spec, data_faults, source))
    lay_out(module, spec, world)
    allocate(module, world.device, parameters_on_cpu=spec.fsdp_cpu_offload)
    if source is None:
        world.on_all(
            lambda: weights.initialise(module, cut(empty(spec), spec.first_blocks), spec.seed)
        )
    else:
        load(module, source, world)
    weights.initialise_adapter(module, spec.seed)
    weights.initialise_score(module, source, spec.seed)
    module.train(not spec.frozen)
    return Model(module, adapters.method(module), DTYPES[spec.dtype])


def lay_out(module: Decoder, spec: ModelSpec, world: World) -> None:
    """Freeze, split, checkpoint and shard `module` in place as `spec` says.

    Args:
        module: on the meta device, from `empty`.
    """
    if spec.frozen:
        module.requires_grad_(False)
    else:
        freeze_base(module)
    if module.adapter is not None:
        module.adapter.row_multiple = spec.row_multiple
    for parameter in frozen_by_name(module, spec.freeze or []).values():
        parameter.requires_grad_(False)
    if spec.master_weights:
        # Frozen parameters have no updates that bf16 could lose.
        for parameter in filter(attrgetter("requires_grad"), module.parameters()):
            parameter.data = parameter.data.float()
    use_fsdp = fsdp.needed(spec, world, module.adapter is not None)
    mesh = world.mesh(use_fsdp)
    expert_mesh = world.expert_mesh(use_fsdp)
    if expert_mesh is not None:
        from trainer.parallel import expert_parallel

        # First: tensor parallelism keeps experts whole that are not spread.
        expert_parallel.split(module, expert_mesh["ep"], world.tensor_parallel_dim)
    if mesh is not None and world.tensor_parallel_dim > 1:
        tensor_parallel.split(module, mesh["tp"])
    attention.choose_kernels(module, world.device, DTYPES[spec.dtype])
    activations.prepare(module, spec)
    module.compiles_loss = spec.compile
    if use_fsdp:
        fsdp.shard(module, mesh, DTYPES[spec.dtype], spec, expert_mesh)


def freeze_base(module: Decoder) -> None:
    """Let what `Decoder.is_trained` names be trained, and nothing else."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(module.is_trained(name))


def empty(spec: ModelSpec) -> Decoder:
    """Return the model that `spec` names, without weights, on the meta device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[spec.dtype])
    try:
        with torch.device("meta"):
            module = empty_module(
                spec.model, spec.model_folder, rows_of(spec.tokenizer), spec.frozen
            )
            if spec.has_score_head:
                module.use_score_head()
    finally:
        torch.set_default_dtype(before)
    if spec.fp8_recipe is not None:
        linear.use_fp8(module, module.linear_layers(), spec.fp8_recipe)
    return module


def cut(module: Decoder, first_blocks: int | None) -> Decoder:
    """Take off the blocks behind these, and return the module; None leaves all.

    A frozen model beside the policy is cut like it.
    """
    del module.blocks[first_blocks or len(module.blocks) :]
    return module


def new_ids(tokenizer: dict[str, Any]) -> range:
    """The ids of the tokens that the config's block adds to the tokenizer.

    Raises:
        ConfigError: they cannot be added, or the tokenizer is missing.
    """
    if not tokenizer.get("new_tokens"):
        return range(0)
    ids: range = instantiate("tokenizer", tokenizer).new_ids
    return ids


def rows_of(tokenizer: dict[str, Any]) -> Callable[[int], int] | None:
    """What `empty_module` is to make of the number of rows of the embedding."""
    if not tokenizer.get("new_tokens"):
        return None
    if not Path(str(tokenizer.get("path"))).is_dir():
        # Before the download it is not known how many rows belong to no token yet.
        count = len(tokens.new_tokens(tokenizer))
        return lambda rows: tokens.grown(rows, rows + count)
    stop = new_ids(tokenizer).stop
    return lambda rows: tokens.grown(rows, stop)


def own_keys(block: dict[str, Any]) -> set[str]:
    """The keys of a `model` block that the trainer reads and does not pass to the component.

    Raises:
        ConfigError: there is no such kind of adapter.
    """
    kind = adapters.kind_of(block)
    keys = LORA.keys if kind is None else kind.declared.keys
    return {"quantize_base", "adapter", "modules_to_save", *keys}


def empty_module(
    block: dict[str, Any],
    folder: Path | None = None,
    rows: Callable[[int], int] | None = None,
    frozen: bool = False,
) -> Decoder:
    """Return the model that a `model` block names, without weights; call it on the meta device.

    With `quantize_base` the weights of its blocks are NF4.

    Args:
        folder: whose config.json names the model if the block does not.
        rows: from the number of rows of its embedding to those that it is to have, for new tokens.
        frozen: nothing of it is trained.

    Raises:
        ConfigError: the component returns no decoder, or one that cannot be quantised; or nothing
            can be made of the folder.
    """
    quantised, kind = block.get("quantize_base", False), adapters.kind_of(block)
    ours = own_keys(block)
    plain = {key: value for key, value in block.items() if key not in ours}
    if block["_component_"] == TRANSFORMERS:
        if unknown := sorted(plain.keys() - {"_component_"}):
            raise ConfigError(
                f"model.{unknown[0]}: is an argument of no model that a folder names; known: "
                f"{', '.join(sorted(ours))}"
            )
        # Imported late, as the other source: a rank is to start fast.
        from trainer.models.transformers import source

        model = source.empty(folder or Path(), rows)
    elif rows is not None:
        raise ConfigError(
            f"{tokens.KEY}: needs a model that its folder names; leave model._component_ out"
        )
    else:
        model = instantiate("model", plain)
        if not isinstance(model, Decoder):
            raise ConfigError(
                f"model: {block['_component_']} returns a {type(model).__name__}, not a "
                "trainer.model.Decoder"
            )
    model.family = family_of(block, folder)
    _add_adapter(model, block, kind)
    model.modules_to_save = tuple(block.get("modules_to_save") or ())
    if quantised:
        _quantise(model, frozen)
    return model


def _add_adapter(model: Decoder, block: dict[str, Any], kind: AdapterKind | None) -> None:
    if kind is not None:
        kind.add(model)
        model.adapter = kind
    elif given := [key for key in LORA.keys if block.get(key) is not None]:
        raise ConfigError(f"model.{given[0]}: needs model.lora_rank")


def _quantise(model: Decoder, frozen: bool) -> None:
    if model.adapter is None and not frozen:
        raise ConfigError(
            "model.quantize_base: only adapters can be trained over a quantised base; "
            "set model.lora_rank, or set model.quantize_base=False"
        )
    from trainer.layers import experts

    names = model.linear_layers()
    routed = [layer for _, layer in experts.layers(model)]
    weights_of = [model.get_submodule(name).weight for name in names]
    weights_of += [getattr(layer, name) for layer in routed for name in experts.MATRICES]
    if faults := nf4.faults(weights_of):
        raise ConfigError(*faults)
    linear.quantise(model, names)
    for layer in routed:
        experts.quantise(layer)


def source_of(spec: ModelSpec) -> weights.SafetensorsSource | None:
    """Return the files that `spec` names; None if training begins from scratch.

    Raises:
        ConfigError: the model folder is missing or incomplete.
    """
    return weights.SafetensorsSource.open(spec.checkpointer) if spec.reads_weights else None


def fitting(
    spec: ModelSpec,
    data_faults: DataFaults | None = None,
    source: weights.SafetensorsSource | None = None,
) -> tuple[weights.SafetensorsSource | None, Decoder]:
    """Return the files that `spec` names, and an empty model that fits them.

    There are no files if training begins from scratch.

    Args:
        source: `source_of(spec)`, if it is known: every file of the model is opened for it.

    Raises:
        ConfigError: the model folder is missing, incomplete, or holds another model.
    """
    source = source or source_of(spec)
    hf_config = weights.read_hf_config(spec.model_folder / "config.json")
    module = empty(spec)
    module.folder_tensors = source.shapes if source else {}
    faults = [*family_faults(spec, hf_config), *module.fit(hf_config, spec)]
    cut(module, spec.first_blocks)
    if module.adapter is not None:
        faults += module.adapter.fit(module, spec.tokenizer)
    faults += layout_faults(module, spec)
    if data_faults is not None:
        faults += data_faults(module.vocab_size, module.longest_document)
    if source is not None:
        if spec.first_blocks:
            source = source.of(module)
        source = weights.with_new_rows(source, module, new_ids(spec.tokenizer))
        faults += weights.mismatches(module, source, spec.model_folder)
    if faults:
        raise ConfigError(*faults)
    return source, module


def _check_dtypes(spec: ModelSpec, device: torch.device) -> None:
    on_gpu = device.type == "cuda"
    if on_gpu and spec.dtype == "bf16" and not torch.cuda.is_bf16_supported():
        raise ConfigError("dtype: this GPU has no bf16; set dtype=fp32")
    if spec.fp8_recipe and (lack := fp8.missing(device)):
        raise ConfigError(f"enable_fp8_training: {lack}; set enable_fp8_training=False")
    name = spec.flash_attention
    if name and (lack := attention.replace_flash_attention(name, device)):
        raise ConfigError(f"flash_attention: {name}: {lack}; leave flash_attention out")


def allocate(module: Decoder, device: torch.device, *, parameters_on_cpu: bool) -> None:
    """Bring `module` from the meta device to memory, and fill its buffers; weights are not yet."""
    module.to_empty(device="cpu" if parameters_on_cpu else device)
    if parameters_on_cpu:
        for owner in module.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                setattr(owner, name, torch.empty_like(buffer, device=device))
    module.fill_buffers(device)
    nf4.fill_tables(module)
