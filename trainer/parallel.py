"""How the model is laid out over the ranks: copies, FSDP2 by block, and tensor parallelism."""

import logging
import math
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from trainer.compat import TiedLinear, TransformerDecoder
from trainer.config import TrainConfig
from trainer.distributed import World

# Parameters that are split by both dimensions are gathered in two steps; torch warns of each.
logging.getLogger("torch.distributed.tensor._redistribute").addFilter(
    lambda record: "sequential all_gather" not in record.getMessage()
)
# A split embedding gives a view of what was communicated, and nothing changes it in place.
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(FSDPEmbedding\)")


def needs_fsdp(config: TrainConfig, world: World) -> bool:
    """Whether FSDP2 holds the model: over several ranks, or for what it alone can do on one.

    That is to keep parameters on the CPU, and to compute in another dtype than they are kept in.
    """
    return world.data_size > 1 or config.fsdp_cpu_offload or config.master_weights is not None


def described(config: TrainConfig, world: World) -> str:
    """The layout in words, for the log."""
    masters = f" with {config.master_weights} master weights" if config.master_weights else ""
    fp8 = f", products in fp8 ({config.fp8_recipe})" if config.fp8_recipe else ""
    parts = [config.dtype + masters + fp8]
    if world.shard_dim > 1:
        parts.append(f"FSDP over {world.shard_dim}")
    if world.replicate_dim > 1:
        parts.append(f"{world.replicate_dim} copies")
    if world.tensor_parallel_dim > 1:
        parts.append(f"tensor parallel over {world.tensor_parallel_dim}")
    if config.fsdp_cpu_offload:
        parts.append("parameters and optimizer on the CPU")
    return ", ".join(parts)


def device_mesh(world: World, fsdp: bool) -> DeviceMesh | None:
    """The ranks as a mesh (dp_replicate, dp_shard, tp); None for one rank without FSDP.

    Dimensions of size 1 are left out, but for dp_shard where FSDP is used. Ranks of one
    tensor-parallel group are neighbours, and so are those of one copy, so that they share a node.
    """
    sizes = {
        "dp_replicate": world.replicate_dim,
        "dp_shard": world.shard_dim,
        "tp": world.tensor_parallel_dim,
    }
    kept = {n: size for n, size in sizes.items() if size > 1 or (fsdp and n == "dp_shard")}
    if not kept:
        return None
    return init_device_mesh(world.device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def shard(
    model: TransformerDecoder, mesh: DeviceMesh, dtype: torch.dtype, config: TrainConfig
) -> None:
    """Shard `model` over the mesh's dp_shard, and copy it over dp_replicate, in place.

    It computes in `dtype`; gradients are summed over ranks in fp32, or in bf16 where the config
    says so: half as many bytes, and sums of micro-steps in bf16 too. With both dimensions this is
    hybrid sharding: weights are gathered within a copy, gradients are summed over all copies.

    Args:
        model: on the meta device, before its weights are loaded; tensor parallelism comes first.
    """
    copies = "dp_replicate" in mesh.mesh_dim_names
    reduced = torch.bfloat16 if config.fsdp_reduce_dtype == "bf16" else torch.float32
    options = {
        "mesh": mesh["dp_replicate", "dp_shard"] if copies else mesh["dp_shard"],
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced),
        "reshard_after_forward": config.fsdp_reshard_after_forward,
    }
    if config.fsdp_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    extra_layers = config.custom_sharded_layers or []
    for name in extra_layers:
        if not _stays_with_root(model, name):
            fully_shard(model.get_submodule(name), **options)
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    if config.fsdp_prefetch:
        _prefetch(model, config.fsdp_prefetch)


def _prefetch(model: TransformerDecoder, depth: int) -> None:
    """Gather so many blocks ahead, forwards and backwards.

    By itself FSDP2 asks for a block's weights when the one before it has been launched, which is
    early enough only while the CPU is far ahead of the GPU.
    """
    layers = list(model.layers)
    model.set_modules_to_forward_prefetch(layers[:depth])
    model.set_modules_to_backward_prefetch(layers[: -depth - 1 : -1])
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 1 + depth])
        before = layers[max(0, index - depth) : index]
        layer.set_modules_to_backward_prefetch(before[::-1])


def _stays_with_root(model: TransformerDecoder, name: str) -> bool:
    # A tied embedding is needed again by the output, after it would have been sharded again.
    if isinstance(model.output, TiedLinear) and name in ("tok_embeddings", "output"):
        return True
    # Each part of the logits would gather the output layer, and how many parts there are depends
    # on the length of a rank's batch: the ranks' collectives would no longer match.
    return name == "output" and model.num_output_chunks > 0


def set_gradient_sync(model: nn.Module, *, last: bool, each: bool) -> None:
    """Say before a backward pass whether it sums gradients over ranks.

    Between micro-steps nothing is sent, and every rank keeps a whole copy's gradients in fp32.

    Args:
        last: this is the last micro-step.
        each: sum within a copy after each micro-step, so that every rank keeps its shard only.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or each)
        model.set_requires_all_reduce(last)


def reshard(model: nn.Module) -> None:
    """Give up the gathered parameters that a forward pass without a backward pass has left."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_part(parameter: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """The part of `full` (the whole tensor, any rank) that this rank keeps of `parameter`."""
    if not isinstance(parameter, DTensor):
        return full
    mesh = parameter.device_mesh
    # FSDP, the first dimension, has cut what tensor parallelism, the last one, had left.
    for dimension in reversed(range(mesh.ndim)):
        placement = parameter.placements[dimension]
        if not placement.is_replicate():
            parts = full.chunk(mesh.size(dimension), placement.dim)
            index = mesh.get_local_rank(dimension)
            full = parts[index] if index < len(parts) else full.narrow(placement.dim, 0, 0)
    return full


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The unsharded tensor, on every rank; all ranks must call this together."""
    if not isinstance(tensor, DTensor):
        return tensor
    # What is kept on the CPU is gathered where the ranks' own network is.
    return tensor.to(tensor.device_mesh.device_type).full_tensor()


def clip_gradients(
    parameters: list[nn.Parameter], max_norm: float | None, loss: torch.Tensor | None = None
) -> torch.Tensor:
    """Total gradient norm over all ranks (a scalar, fp32); clips to `max_norm` where it is given.

    The factor is min(1, max_norm / (norm + 1e-6)), as in torch.nn.utils.clip_grad_norm_. Nothing
    in here waits for the device.

    Args:
        loss: this rank's, detached; where it is not finite on any rank, the norm is not either.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    norms = torch._foreach_norm(local, dtype=torch.float32)
    squares = torch._foreach_pow(norms, 2)
    # A part that several ranks hold alike counts once.
    torch._foreach_mul_(squares, [1 / _holders(g) for g in gradients])
    total = torch.stack(squares).sum()
    if loss is not None:
        total = total + 0 * loss.to(total.device)
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    norm = total.sqrt()
    if max_norm is not None:
        torch._foreach_mul_(local, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def sum_shares(parameters: list[nn.Parameter]) -> None:
    """Sum gradients of which each tensor-parallel rank holds a share; FSDP has summed its own."""
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def _holders(tensor: torch.Tensor) -> int:
    """How many ranks hold the same part of `tensor`."""
    if not isinstance(tensor, DTensor):
        return 1
    replicated = [i for i, p in enumerate(tensor.placements) if p.is_replicate()]
    return math.prod(tensor.device_mesh.size(i) for i in replicated)
