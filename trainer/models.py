"""The model: built on the meta device, laid out over the ranks, filled from safetensors."""

import json
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from trainer import families, parallel, tensor_parallel, weights
from trainer.compat import (
    LoRALinear,
    TransformerDecoder,
    TransformerSelfAttentionLayer,
    get_act_offloading_ctx_manager,
    get_adapter_params,
)
from trainer.config import TrainConfig, arguments_of, instantiate
from trainer.distributed import World
from trainer.errors import ConfigError

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Model:
    """A model ready to train, and what the export must know about it."""

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
        """(trainable, all) parameters of the whole model, not of this rank's part."""
        return sum(p.numel() for p in self.trainable), sum(
            p.numel() for p in self.module.parameters()
        )


def build(config: TrainConfig, world: World, output_chunks: int = 0) -> Model:
    """Build, shard and fill the model that `config` names.

    Every rank holds only its own part of the weights.

    Args:
        output_chunks: in how many parts the model gives its logits (0: whole).

    Raises:
        ConfigError: the model folder is missing, incomplete, or holds another model.
    """
    source, hf_config, module = world.agree(lambda: _checked_module(config, world))
    dtype = DTYPES[config.dtype]
    adapter = get_adapter_params(module)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not adapter or name in adapter)
    mesh = parallel.device_mesh(world)
    if world.tensor_parallel_dim > 1:
        tensor_parallel.split(module, mesh["tp"])
    if config.enable_activation_checkpointing:
        apply_activation_checkpointing(
            module,
            checkpoint_wrapper_fn=checkpoint_wrapper,
            check_fn=lambda m: isinstance(m, TransformerSelfAttentionLayer),
        )
    if config.compile:
        for layer in module.layers:
            layer.compile()
    if output_chunks:
        module.set_num_output_chunks(output_chunks)
    if world.data_size > 1:
        parallel.shard(
            module,
            mesh["dp_shard"],
            dtype,
            extra_layers=config.custom_sharded_layers or [],
            reshard_after_forward=config.fsdp_reshard_after_forward,
        )
    module.to_empty(device=world.device)
    _fill_rope_caches(module, world.device)
    world.agree(lambda: weights.load(module, source, hf_config))
    weights.initialise_adapter(module, config.seed)
    module.train()
    return Model(module, hf_config, "LoRA" if adapter else "full", dtype)


def _checked_module(
    config: TrainConfig, world: World
) -> tuple[weights.SafetensorsSource, dict[str, Any], TransformerDecoder]:
    """The files, their config.json and an empty model on the meta device that fits them."""
    source = weights.SafetensorsSource.open(config.checkpointer)
    hf_config = families.read_hf_config(config.model_folder)
    faults = families.model_type_faults(config.checkpointer, hf_config)
    bf16 = config.dtype == "bf16"
    if bf16 and world.device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ConfigError("dtype: this GPU has no bf16; set dtype=fp32")
    with torch.device("meta"), _default_dtype(DTYPES[config.dtype]):
        module = instantiate("model", config.model)
    if not isinstance(module, TransformerDecoder):
        raise ConfigError(f"model: builds a {type(module).__name__}, not a text decoder")
    names = dict(module.named_modules())
    faults += [
        f"custom_sharded_layers: the model has no layer {name}"
        for name in config.custom_sharded_layers or []
        if name not in names and not hasattr(module, str(name))
    ]
    faults += families.fit(module, hf_config, arguments_of("model", config.model))
    faults += tensor_parallel.faults(module, config.tensor_parallel_dim)
    faults += weights.mismatches(module, source, config.model_folder, hf_config)
    if faults:
        raise ConfigError(*faults)
    return source, hf_config, module


def lora_modules(module: nn.Module) -> dict[str, LoRALinear]:
    """The LoRA layers by their plain names."""
    return {
        weights.plain_name(name): child
        for name, child in module.named_modules()
        if isinstance(child, LoRALinear)
    }


def activation_offloading(model: Model, config: TrainConfig) -> Any:
    """A context manager for the forward pass; it does nothing unless offloading is asked for."""
    return get_act_offloading_ctx_manager(model.module, config.enable_activation_offloading)


@contextmanager
def _default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _fill_rope_caches(module: nn.Module, device: torch.device) -> None:
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
