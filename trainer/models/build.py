"""The model: built on the meta device, laid out over the ranks, filled from safetensors."""

import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from trainer.config import TrainConfig
from trainer.errors import ConfigError
from trainer.layers import attention, fp8, lora, nf4
from trainer.models.decoder import Decoder, Role
from trainer.models.sources import empty_module
from trainer.parallel import activations, fsdp, tensor_parallel
from trainer.parallel.mesh import device_mesh, needs_fsdp
from trainer.parallel.world import World
from trainer.storage import weights

# RMSNorm computes in fp32 with a bf16 weight; compiled, that is one kernel all the same.
warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Model:
    """A model ready to train, and what the export must know about it.

    dtype: what it computes and is exported in; with master weights parameters are kept in fp32.
    """

    module: Decoder
    method: str
    dtype: torch.dtype

    @property
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


def build(
    config: TrainConfig,
    world: World,
    output_chunks: int = 0,
    data_faults: Callable[[int, int], list[str]] | None = None,
) -> Model:
    """Build, shard and fill the model that `config` names.

    Every rank holds only its own part of the weights.

    Args:
        output_chunks: in how many chunks the model gives its logits (0: whole).
        data_faults: see `fitting`.

    Raises:
        ConfigError: the model folder is missing, incomplete, or holds another model.
    """
    world.on_all(lambda: _check_dtypes(config, world.device))
    source, module = world.on_all(lambda: fitting(config, data_faults))
    lay_out(module, config, world, output_chunks)
    allocate(module, world.device, parameters_on_cpu=config.fsdp_cpu_offload)
    world.on_all(lambda: weights.load(module, source))
    fp8.fill_magnitudes(module)
    weights.initialise_adapter(module, config.seed)
    module.train()
    return Model(module, lora.method(module), DTYPES[config.dtype])


def lay_out(module: Decoder, config: TrainConfig, world: World, output_chunks: int = 0) -> None:
    """Freeze, split, checkpoint and shard `module` in place as `config` says.

    Args:
        module: on the meta device, from `empty`.
        output_chunks: in how many chunks the model gives its logits (0: whole).
    """
    freeze_base(module)
    if config.master_weights:
        _keep_trainable_in_fp32(module)
    use_fsdp = needs_fsdp(config, world)
    mesh = device_mesh(world, use_fsdp)
    if world.tensor_parallel_dim > 1:
        tensor_parallel.split(module, mesh["tp"])
    attention.choose_kernels(module, world.device, DTYPES[config.dtype])
    activations.prepare(module, config)
    module.num_output_chunks = output_chunks
    if use_fsdp:
        fsdp.shard(module, mesh, DTYPES[config.dtype], config)


def freeze_base(module: nn.Module) -> None:
    """Let only the adapter be trained, or everything if there is no adapter."""
    adapted = lora.method(module) != "full"
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not adapted or lora.is_adapter(name))


def empty(config: TrainConfig) -> Decoder:
    """Return the model that `config` names, without weights, on the meta device."""
    with torch.device("meta"), _default_dtype(DTYPES[config.dtype]):
        module = empty_module(config.model)
    if config.fp8_recipe is not None:
        lora.use_fp8(module, module.linear_layers(), config.fp8_recipe)
    return module


def fitting(
    config: TrainConfig, data_faults: Callable[[int, int], list[str]] | None = None
) -> tuple[weights.SafetensorsSource, Decoder]:
    """Return the files that `config` names, and an empty model that fits them.

    Args:
        data_faults: (number of tokens, number of positions that the model knows) -> what in the
            data it cannot take.

    Raises:
        ConfigError: the model folder is missing, incomplete, or holds another model.
    """
    source = weights.SafetensorsSource.open(config.checkpointer)
    hf_config = weights.read_hf_config(config.model_folder)
    module = empty(config)
    faults = module.fit(hf_config, config)
    names = dict(module.named_modules())
    faults += [
        f"custom_sharded_layers: the model has no layer {name}"
        for name in config.custom_sharded_layers or []
        if name not in names and not hasattr(module, str(name))
    ]
    faults += layout_faults(module, config)
    if data_faults is not None:
        faults += data_faults(module.vocab_size, module.max_seq_len)
    faults += weights.mismatches(module, source, config.model_folder)
    if faults:
        raise ConfigError(*faults)
    return source, module


def layout_faults(module: Decoder, config: TrainConfig) -> list[str]:
    """Return why a model from `empty` cannot be split, or use fp8, as `config` says."""
    ranks = config.tensor_parallel_dim
    faults = tensor_parallel.faults(module, ranks)
    if config.fp8_recipe is not None:
        row = set(module.linear_layers(Role.ROW))
        layers = {name: module.get_submodule(name) for name in module.linear_layers()}
        faults += fp8.faults({layer: name in row for name, layer in layers.items()}, ranks)
    return faults


def _check_dtypes(config: TrainConfig, device: torch.device) -> None:
    on_gpu = device.type == "cuda"
    if on_gpu and config.dtype == "bf16" and not torch.cuda.is_bf16_supported():
        raise ConfigError("dtype: this GPU has no bf16; set dtype=fp32")
    if config.fp8_recipe and (lack := fp8.missing(config.fp8_recipe, device)):
        raise ConfigError(f"enable_fp8_training: {lack}; set enable_fp8_training=False")


def _keep_trainable_in_fp32(module: nn.Module) -> None:
    """Make trainable parameters fp32; frozen ones have no updates that bf16 could lose."""
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


def allocate(module: Decoder, device: torch.device, *, parameters_on_cpu: bool) -> None:
    """Bring `module` from the meta device to memory, and fill its buffers; weights are not yet."""
    module.to_empty(device="cpu" if parameters_on_cpu else device)
    if parameters_on_cpu:
        for owner in module.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                setattr(owner, name, torch.empty_like(buffer, device=device))
    module.fill_buffers(device)
    nf4.fill_tables(module)
