"""FSDP2, block by block: sharding, prefetching, and giving gathered parameters up."""

import warnings
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from runspec import versions
from runspec.keys.train import ModelSpec
from trainer.errors import ConfigError
from trainer.layers import nf4
from trainer.model import Decoder
from trainer.parallel.gradients import REDUCED_IN
from trainer.parallel.world import World
from trainer.sharded import local

# A split embedding returns a view of what was communicated, and nothing changes it in place.
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(FSDPEmbedding\)")


def needed(spec: ModelSpec, world: World, adapted: bool) -> bool:
    """Whether FSDP2 shards the model: over several ranks, or for features that only it has on one.

    That is to keep parameters on the CPU, and to compute in another dtype than they are kept in.

    Args:
        adapted: only an adapter is trained. Its gradients are few: if every rank has the whole
            model, `gradients.average_over_replicas` sends them, and nothing is gathered.
    """
    if spec.fsdp_cpu_offload or spec.master_weights is not None:
        return True
    return world.layout.shard > 1 or (world.layout.replicate > 1 and not adapted)


def shard(
    model: Decoder,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    spec: ModelSpec,
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Shard `model` over the mesh's dp_shard, and replicate it over dp_replicate, in place.

    It computes in `dtype`. Gradients are summed over ranks in fp32, or in bf16 if `spec` says
    so: half as many bytes, and sums of micro-steps in bf16 too. With both dimensions this is
    hybrid sharding: weights are gathered within a replica, gradients are summed over all replicas.

    Args:
        model: on the meta device, before its weights are loaded; tensor parallelism comes first.
        expert_mesh: of experts that are spread; they are sharded over its ep_shard.

    Raises:
        ConfigError: the base is quantized, and this torch cannot shard it.
    """
    fault = versions.sharding_fault(torch.__version__)
    if fault and any(map(nf4.is_packed, model.parameters())):
        raise ConfigError(fault)
    replicated = "dp_replicate" in mesh.mesh_dim_names
    options: dict[str, Any] = {
        "mesh": mesh["dp_replicate", "dp_shard"] if replicated else mesh["dp_shard"],
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=REDUCED_IN[spec.fsdp_reduce_dtype]
        ),
        "reshard_after_forward": spec.fsdp_reshard_after_forward,
        "shard_placement_fn": partial(_placement, mesh["dp_shard"].size()),
    }
    if spec.fsdp_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    tables = _tables_apart(model)
    # What stays until the backward pass is over is not gathered for it: the loss needs the head at
    # once, and the root's rest is small or was needed by the loss too.
    stays = options | {"reshard_after_forward": False}
    for table in tables:
        if isinstance(table, nn.Embedding) and len(list(table.parameters())) == 1:
            # Its backward pass needs no weights: neither kept, nor fetched ahead.
            fully_shard(table, **options | {"reshard_after_forward": True})
            table.set_unshard_in_backward(False)
        else:
            fully_shard(table, **(options if table is model.embedding else stays))
    if expert_mesh is not None:
        _shard_experts(model, expert_mesh, options)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **stays)
    if depth := spec.fsdp_prefetch or (1 if expert_mesh is not None else 0):
        _prefetch(model, depth, tables)
    elif model.output_head in tables:
        # Gathered while the last block computes.
        model.blocks[-1].set_modules_to_forward_prefetch([model.output_head])


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


def _tables_apart(model: Decoder) -> list[nn.Module]:
    """The embedding and the output head, if FSDP may gather them separately.

    In the root they would be gathered before the first block, with nothing to hide behind.
    """
    # A tied embedding is needed again by the output, after it would have been sharded again.
    if model.is_tied:
        return []
    return [table for table in (model.embedding, model.output_head) if table is not None]


def _prefetch(model: Decoder, depth: int, tables: list[nn.Module]) -> None:
    """Gather this many blocks ahead, forwards and backwards, with all groups within them.

    By default FSDP2 asks for a group's weights when the one before it has been launched, which is
    early enough only while the CPU is far ahead of the GPU. With experts that are spread it never
    is: in each block it waits for the numbers of rows.

    Args:
        tables: modules that are gathered separately before and after the blocks.
    """
    blocks = list(model.blocks)
    inner = [
        [m for m in block.modules() if m is not block and isinstance(m, FSDPModule)]
        for block in blocks
    ]
    groups = [[block, *within] for block, within in zip(blocks, inner, strict=True)]
    first = [table for table in tables if table is model.embedding]
    head = [table for table in tables if table is model.output_head]
    model.set_modules_to_forward_prefetch([*first, *chain(*groups[:depth])])
    model.set_modules_to_backward_prefetch([*chain(*groups[: -depth - 1 : -1])])
    for index, block in enumerate(blocks):
        ahead = [*groups, head][index + 1 : index + 1 + depth]
        block.set_modules_to_forward_prefetch([*inner[index], *chain(*ahead)])
        before = groups[max(0, index - depth) : index]
        block.set_modules_to_backward_prefetch([*inner[index], *chain(*before[::-1])])
