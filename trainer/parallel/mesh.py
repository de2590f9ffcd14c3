"""The ranks of a run as a device mesh, and the layout in words."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.config import TrainConfig
from trainer.parallel.world import World


def needs_fsdp(config: TrainConfig, world: World) -> bool:
    """Whether FSDP2 holds the model: over several ranks, or for what only FSDP2 can do on one.

    That is to keep parameters on the CPU, and to compute in another dtype than they are kept in.
    """
    return world.data_size > 1 or config.fsdp_cpu_offload or config.master_weights is not None


def described(config: TrainConfig, world: World) -> str:
    """Return the layout in words, for the log."""
    layout = world.layout
    masters = f" with {config.master_weights} master weights" if config.master_weights else ""
    fp8 = f", products in fp8 ({config.fp8_recipe})" if config.fp8_recipe else ""
    parts = [config.dtype + masters + fp8]
    if layout.shard > 1:
        parts.append(f"FSDP over {layout.shard}")
    if layout.replicate > 1:
        parts.append(f"{layout.replicate} data-parallel replicas")
    if layout.tensor_parallel > 1:
        parts.append(f"tensor parallel over {layout.tensor_parallel}")
    if config.fsdp_cpu_offload:
        parts.append("parameters and optimizer on the CPU")
    return ", ".join(parts)


def device_mesh(world: World, fsdp: bool) -> DeviceMesh | None:
    """Return the ranks as a mesh (dp_replicate, dp_shard, tp); None for one rank without FSDP.

    Dimensions of size 1 are left out, except dp_shard if FSDP is used. The ranks lie as
    runspec.layout says.
    """
    layout = world.layout
    sizes = {
        "dp_replicate": layout.replicate,
        "dp_shard": layout.shard,
        "tp": layout.tensor_parallel,
    }
    kept = {n: size for n, size in sizes.items() if size > 1 or (fsdp and n == "dp_shard")}
    if not kept:
        return None
    return init_device_mesh(world.device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))
