"""FSDP2, block by block: sharding, prefetching, and giving gathered parameters up."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from trainer.config import TrainConfig
from trainer.models.decoder import Decoder
from trainer.parallel.sharded import local
from trainer.parallel.world import World

# A split embedding returns a view of what was communicated, and nothing changes it in place.
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(FSDPEmbedding\)")


def needed(config: TrainConfig, world: World) -> bool:
    """Whether FSDP2 holds the model: over several ranks, or for what only FSDP2 can do on one.

    That is to keep parameters on the CPU, and to compute in another dtype than they are kept in.
    """
    return world.data_size > 1 or config.fsdp_cpu_offload or config.master_weights is not None


def shard(
    model: Decoder,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    config: TrainConfig,
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Shard `model` over the mesh's dp_shard, and replicate it over dp_replicate, in place.

    It computes in `dtype`. Gradients are summed over ranks in fp32, or in bf16 if the config says
    so: half as many bytes, and sums of micro-steps in bf16 too. With both dimensions this is
    hybrid sharding: weights are gathered within a replica, gradients are summed over all replicas.

    Args:
        model: on the meta device, before its weights are loaded; tensor parallelism comes first.
        expert_mesh: of experts that are spread; they are sharded over its ep_shard.
    """
    replicated = "dp_replicate" in mesh.mesh_dim_names
    reduced = torch.bfloat16 if config.fsdp_reduce_dtype == "bf16" else torch.float32
    options: dict[str, Any] = {
        "mesh": mesh["dp_replicate", "dp_shard"] if replicated else mesh["dp_shard"],
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced),
        "reshard_after_forward": config.fsdp_reshard_after_forward,
        "shard_placement_fn": partial(_placement, mesh["dp_shard"].size()),
    }
    if config.fsdp_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    for name in config.custom_sharded_layers or []:
        layer = getattr(model, name) if hasattr(model, name) else model.get_submodule(name)
        if not _stays_with_root(model, layer):
            fully_shard(layer, **options)
    if expert_mesh is not None:
        _shard_experts(model, expert_mesh, options)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    if config.fsdp_prefetch:
        _prefetch(model, config.fsdp_prefetch)


def _shard_experts(model: Decoder, expert_mesh: DeviceMesh, options: dict[str, Any]) -> None:
    """Shard the experts among the ranks that have the same ones."""
    from trainer.layers import experts

    names = tuple(n for n in ("dp_replicate", "ep_shard") if n in expert_mesh.mesh_dim_names)
    policy: MixedPrecisionPolicy = options["mp_policy"]
    own = options | {
        "mesh": expert_mesh[names],
        "shard_placement_fn": partial(_placement, expert_mesh["ep_shard"].size()),
        # The routers' weights of the experts stay in fp32.
        "mp_policy": replace(policy, cast_forward_inputs=False),
    }
    for _, layer in experts.layers(model):
        fully_shard(layer, **own)


def _placement(ranks: int, parameter: nn.Parameter) -> Shard | None:
    """Where a parameter is cut: by its rows (None), or stacked matrices inside of them.

    8 experts have no equal parts for 16 ranks, and cut by rows every other rank would have none.
    """
    own = local(parameter)
    if own.ndim < 3 or own.shape[0] % ranks == 0:
        return None
    even = (axis for axis in range(1, own.ndim) if own.shape[axis] % ranks == 0)
    return next(map(Shard, even), None)


def _prefetch(model: Decoder, depth: int) -> None:
    """Gather so many blocks ahead, forwards and backwards.

    By itself FSDP2 asks for a block's weights when the one before it has been launched, which is
    early enough only while the CPU is far ahead of the GPU.
    """
    blocks = list(model.blocks)
    model.set_modules_to_forward_prefetch(blocks[:depth])
    model.set_modules_to_backward_prefetch(blocks[: -depth - 1 : -1])
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + depth])
        before = blocks[max(0, index - depth) : index]
        block.set_modules_to_backward_prefetch(before[::-1])


def _stays_with_root(model: Decoder, layer: Any) -> bool:
    if not isinstance(layer, nn.Module):
        return True
    # A tied embedding is needed again by the output, after it would have been sharded again.
    if layer is model.embedding and model.output_head is None and model.score_head is None:
        return True
    # Each chunk of logits would gather the output head, and how many chunks there are depends on
    # the length of a rank's batch: the ranks' collectives would no longer match.
    return layer is model.output_head and model.num_output_chunks > 0


def reshard(model: nn.Module) -> None:
    """Give up the gathered parameters that a forward pass without a backward pass has left."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
