"""How the model is laid out over the ranks: FSDP2, one shard group a transformer block."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.compat import TiedLinear, TransformerDecoder
from trainer.distributed import World


def shard(
    model: TransformerDecoder,
    world: World,
    dtype: torch.dtype,
    *,
    extra_layers: list[str],
    reshard_after_forward: bool,
) -> None:
    """Shard `model` over all ranks in place; one rank keeps it whole.

    Gradients are summed over ranks in fp32, whatever `dtype` the weights have.

    Args:
        model: on the meta device, before its weights are loaded.
        extra_layers: names of modules to shard by themselves (large embeddings).
    """
    if world.size == 1:
        return
    mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("dp_shard",))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    options = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": reshard_after_forward}
    for name in extra_layers:
        if not _stays_with_root(model, name):
            fully_shard(model.get_submodule(name), **options)
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)


def _stays_with_root(model: TransformerDecoder, name: str) -> bool:
    # A tied embedding is needed again by the output, after it would have been sharded again.
    if isinstance(model.output, TiedLinear) and name in ("tok_embeddings", "output"):
        return True
    # Each part of the logits would gather the output layer, and how many parts there are depends
    # on the length of a rank's batch: the ranks' collectives would no longer match.
    return name == "output" and model.num_output_chunks > 0


def set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Whether the next backward pass sums gradients over ranks (off between micro-steps)."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)


def local_part(parameter: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """The part of `full` (the whole tensor, any rank) that this rank keeps of `parameter`."""
    if not isinstance(parameter, DTensor):
        return full
    # Every rank has read the whole tensor, so none needs to send it.
    return distribute_tensor(
        full, parameter.device_mesh, parameter.placements, src_data_rank=None
    ).to_local()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The unsharded tensor, on every rank; all ranks must call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip_gradients(parameters: list[nn.Parameter], max_norm: float | None) -> torch.Tensor:
    """Total gradient norm over all ranks (a scalar); clips to `max_norm` where it is given."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if max_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return whole(norm)
