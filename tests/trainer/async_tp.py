"""trainer.sft on CPUs with the operators of asynchronous tensor parallelism, which it counts.

torch has them for GPUs only, and looks for NCCL before its compiler puts them in. Here each is what
it is documented to equal: the message, and the products.
"""

from collections import Counter

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # defines the operators

from trainer import sft

ran: Counter[str] = Counter()


def gather(
    shard: torch.Tensor,
    others: list[torch.Tensor],
    dim: int,
    group: str,
    *,
    return_A: bool = True,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    ran["all_gather"] += 1
    # The real one's results lie in memory by position first, too.
    own = shard.movedim(dim, 0).contiguous()
    messages = torch.ops._c10d_functional
    whole = messages.all_gather_into_tensor(own, dist.get_world_size(), group)
    whole = messages.wait_tensor(whole)
    products = [(whole @ other).movedim(0, dim) for other in others]
    return whole.movedim(0, dim) if return_A else None, products


def scatter(
    one: torch.Tensor, other: torch.Tensor, operation: str, dim: int, group: str
) -> torch.Tensor:
    ran["reduce_scatter"] += 1
    whole = (one @ other).movedim(dim, 0).contiguous()
    messages = torch.ops._c10d_functional
    part = messages.reduce_scatter_tensor(whole, operation, dist.get_world_size(), group)
    return messages.wait_tensor(part).movedim(0, dim).contiguous()


def main(arguments: list[str]) -> int:
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", gather, "CPU")
    library.impl("fused_matmul_reduce_scatter", scatter, "CPU")
    dist.is_nccl_available = lambda: True
    try:
        return sft.main(arguments)
    finally:
        gathers, scatters = ran["all_gather"], ran["reduce_scatter"]
        print(f"overlapped: {gathers} gathers, {scatters} scatters", flush=True)
