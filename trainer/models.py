"""The model: built on the meta device, laid out over the ranks, filled from safetensors."""

import inspect
import json
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer import (
    activations,
    attention,
    families,
    fp8,
    lora,
    nf4,
    parallel,
    tensor_parallel,
    weights,
)
from trainer.compat import (
    TransformerDecoder,
    get_adapter_params,
)
from trainer.config import TrainConfig, arguments_of, component, instantiate
from trainer.distributed import World
from trainer.errors import ConfigError

# torchtune's norms compute in fp32 with bf16 weights; compiled, that is one kernel all the same.
warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Model:
    """A model ready to train, and what the export must know about it.

    dtype: what it computes and is exported in; with master weights parameters are kept in fp32.
    """

    module: TransformerDecoder
    hf_config: dict[str, Any]
    method: str
    dtype: torch.dtype

    @property
    def trainable(self) -> list[nn.Parameter]:
        """The parameters that the optimizer moves."""
        return [p for p in self.module.parameters() if p.requires_grad]

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the embedding knows."""
        return self.module.tok_embeddings.num_embeddings

    def parameter_counts(self) -> tuple[int, int]:
        """(trainable, all) parameters of the whole model, not of this rank's part.

        A quantised weight counts as many as it stands for.
        """
        return sum(p.numel() for p in self.trainable), sum(
            nf4.dense_numel(p) for p in self.module.parameters()
        )


def build(
    config: TrainConfig,
    world: World,
    output_chunks: int = 0,
    data_faults: Callable[[int, int], list[str]] | None = None,
) -> Model:
    """Build, shard and fill the model that `config` names.

    Every rank holds only its own part of the weights.

    Args:
        output_chunks: in how many parts the model gives its logits (0: whole).
        data_faults: by (tokens, positions) that the model knows, why the data does not fit it.

    Raises:
        ConfigError: the model folder is missing, incomplete, or holds another model.
    """
    world.agree(lambda: _check_dtypes(config, world.device))
    source, hf_config, module = world.agree(lambda: fitting(config, data_faults))
    lay_out(module, config, world, output_chunks)
    _allocate(module, world.device, parameters_on_cpu=config.fsdp_cpu_offload)
    fill_rope_caches(module, world.device)
    nf4.fill_tables(module)
    world.agree(lambda: weights.load(module, source, hf_config))
    fp8.fill_magnitudes(module)
    weights.initialise_adapter(module, config.seed)
    module.train()
    return Model(module, hf_config, lora.method(module), DTYPES[config.dtype])


def lay_out(
    module: TransformerDecoder, config: TrainConfig, world: World, output_chunks: int = 0
) -> None:
    """Freeze, split, recompute and shard `module` in place as `config` says.

    Args:
        module: on the meta device, from `empty`.
        output_chunks: in how many parts the model gives its logits (0: whole).
    """
    adapter = get_adapter_params(module)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not adapter or name in adapter)
    if config.master_weights:
        _keep_trainable_in_fp32(module)
    fsdp = parallel.needs_fsdp(config, world)
    mesh = parallel.device_mesh(world, fsdp)
    if world.tensor_parallel_dim > 1:
        tensor_parallel.split(module, mesh["tp"])
    attention.use_documents(module, world.device, DTYPES[config.dtype])
    activations.prepare(module, config)
    if output_chunks:
        module.set_num_output_chunks(output_chunks)
    if fsdp:
        parallel.shard(module, mesh, DTYPES[config.dtype], config)


def empty(config: TrainConfig) -> TransformerDecoder:
    """The model that `config` names, without weights, on the meta device."""
    with torch.device("meta"), _default_dtype(DTYPES[config.dtype]):
        module = empty_module(config.model)
    if config.fp8_recipe is not None:
        lora.use_fp8(module, config.fp8_recipe)
    return module


def fitting(
    config: TrainConfig, data_faults: Callable[[int, int], list[str]] | None = None
) -> tuple[weights.SafetensorsSource, dict[str, Any], TransformerDecoder]:
    """The files that `config` names, their config.json, and an empty model that fits them.

    Args:
        data_faults: (tokens, positions that the model knows) -> what in the data it cannot take.

    Raises:
        ConfigError: the model folder is missing, incomplete, or holds another model.
    """
    source = weights.SafetensorsSource.open(config.checkpointer)
    hf_config = families.read_hf_config(config.model_folder)
    faults = families.model_type_faults(config.checkpointer, hf_config)
    module = empty(config)
    names = dict(module.named_modules())
    faults += [
        f"custom_sharded_layers: the model has no layer {name}"
        for name in config.custom_sharded_layers or []
        if name not in names and not hasattr(module, str(name))
    ]
    faults += families.fit(module, hf_config, arguments_of("model", config.model))
    faults += layout_faults(module, config)
    if data_faults is not None:
        faults += data_faults(module.tok_embeddings.num_embeddings, module.max_seq_len)
    faults += weights.mismatches(module, source, config.model_folder, hf_config)
    if faults:
        raise ConfigError(*faults)
    return source, hf_config, module


def layout_faults(module: TransformerDecoder, config: TrainConfig) -> list[str]:
    """Why a model from `empty` cannot be split or multiply as `config` says, one line a reason."""
    faults = tensor_parallel.faults(module, config.tensor_parallel_dim)
    if config.fp8_recipe is not None:
        faults += fp8.faults(lora.base_layers(module), module, config.tensor_parallel_dim)
    return faults


def _check_dtypes(config: TrainConfig, device: torch.device) -> None:
    on_gpu = device.type == "cuda"
    if on_gpu and config.dtype == "bf16" and not torch.cuda.is_bf16_supported():
        raise ConfigError("dtype: this GPU has no bf16; set dtype=fp32")
    if config.fp8_recipe and (lack := fp8.missing(config.fp8_recipe, device)):
        raise ConfigError(f"enable_fp8_training: {lack}; set enable_fp8_training=False")


def empty_module(block: dict[str, Any]) -> TransformerDecoder:
    """The model that a `model` block names, its weights NF4 where it asks for `quantize_base`.

    torchtune's own quantised weights cannot be split over two dimensions; ours are put into what
    a builder makes without them, which also serves the builders that know no `quantize_base`.
    Call it on the meta device.

    Raises:
        ConfigError: no text decoder, or one that cannot be quantised.
    """
    builder = component("model", block["_component_"])
    # A qlora_* builder is the lora_* one with this keyword set.
    preset = getattr(builder, "keywords", {}).get("quantize_base", False)
    quantised = block.get("quantize_base", preset)
    plain = {key: value for key, value in block.items() if key != "quantize_base"}
    if "quantize_base" in inspect.signature(builder).parameters:
        plain["quantize_base"] = False
    module = instantiate("model", plain)
    if not isinstance(module, TransformerDecoder):
        raise ConfigError(f"model: builds a {type(module).__name__}, not a text decoder")
    if quantised:
        _check_quantisable(module)
    lora.prepare(module, quantised)
    return module


def _check_quantisable(module: TransformerDecoder) -> None:
    if not get_adapter_params(module):
        raise ConfigError(
            "model.quantize_base: only adapters can be trained over a quantised base; "
            "use a lora_* builder, or set model.quantize_base=False"
        )
    if faults := nf4.faults(lora.base_layers(module), module):
        raise ConfigError(*faults)


def _keep_trainable_in_fp32(module: nn.Module) -> None:
    """Make trainable parameters fp32 and leave frozen ones, which no update can be lost on."""
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if parameter.requires_grad:
                setattr(owner, name, nn.Parameter(parameter.float()))


@contextmanager
def _default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _allocate(module: nn.Module, device: torch.device, *, parameters_on_cpu: bool) -> None:
    """Bring `module` from the meta device to memory that is not filled yet."""
    module.to_empty(device="cpu" if parameters_on_cpu else device)
    if parameters_on_cpu:
        for owner in module.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                setattr(owner, name, torch.empty_like(buffer, device=device))


def fill_rope_caches(module: nn.Module, device: torch.device) -> None:
    """Compute each distinct rotary table once; layers that are alike share it."""
    tables: dict[str, nn.Module] = {}
    for rope in [m for m in module.modules() if hasattr(m, "rope_init")]:
        numbers = {k: v for k, v in vars(rope).items() if isinstance(v, int | float)}
        numbers.pop("training", None)
        key = type(rope).__name__ + json.dumps(numbers, sort_keys=True)
        if key not in tables:
            with device:
                rope.rope_init()
            tables[key] = rope
        elif rope is not tables[key]:
            for name, buffer in tables[key].named_buffers(recurse=False):
                rope.register_buffer(name, buffer, persistent=False)
            vars(rope).update({k: v for k, v in vars(tables[key]).items() if k == "is_cache_built"})
