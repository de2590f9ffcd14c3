"""How ranks share a model: nodes x GPUs = replicate x shard x tensor x expert.

The one set of rules. The launcher asks it before a job is queued, the sizing when it looks for
other layouts, and every rank when it joins the process group.

Ranks of one tensor-parallel group are neighbours, then those that shard one replica, so that they
share a node: rank = (replica x shard + shard index) x tensor parallel + tensor-parallel index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class LayoutError(ValueError):
    """The ranks cannot be laid out as asked for; one line per fault, each with its remedy."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        super().__init__("\n".join(faults))


@dataclass(frozen=True)
class Layout:
    """A layout that fits its number of ranks.

    replicate: data-parallel replicas of the model. shard: ranks that FSDP shards each replica
    over. tensor_parallel: ranks that split each layer. expert_parallel: ranks that the experts of
    a layer are spread over; they are a part of the shard x tensor_parallel ranks of a replica.
    """

    replicate: int = 1
    shard: int = 1
    tensor_parallel: int = 1
    expert_parallel: int = 1

    @property
    def ranks(self) -> int:
        """GPUs in all, one rank on each."""
        return self.replicate * self.shard * self.tensor_parallel

    @property
    def data_parallel(self) -> int:
        """Groups of ranks that see different data."""
        return self.replicate * self.shard

    @classmethod
    def of(cls, config: Mapping[str, Any], ranks: int, gpus_per_node: int | None = None) -> Layout:
        """Return the layout that a recipe's keys name for so many ranks.

        Args:
            config: the recipe; reads tensor_parallel_dim, expert_parallel_dim,
                data_parallel_replicate_dim and data_parallel_shard_dim (-1: what is left).
            gpus_per_node: also refuse a tensor-parallel group that spans nodes; None does not.

        Raises:
            LayoutError: names every fault.
        """
        tensor = int(config.get("tensor_parallel_dim") or 1)
        expert = int(config.get("expert_parallel_dim") or 1)
        replicate = int(config.get("data_parallel_replicate_dim") or 1)
        shard = int(config.get("data_parallel_shard_dim") or -1)
        shape = f"{ranks} ranks"
        if gpus_per_node:
            shape = f"{ranks // gpus_per_node} x {gpus_per_node} = {ranks} ranks"
        change = "change it, or --nodes, or --gpus-per-node"
        if ranks % tensor:
            raise LayoutError([f"tensor_parallel_dim {tensor} does not divide {shape}: {change}"])
        faults = []
        if gpus_per_node and gpus_per_node % tensor:
            faults.append(
                f"tensor_parallel_dim {tensor} does not divide the {gpus_per_node} GPUs per node, "
                "so that layers would be split across nodes: change it, or --gpus-per-node"
            )
        groups = ranks // tensor
        if shard == -1:
            shard = groups // replicate
        if replicate * shard != groups:
            faults.append(
                f"data_parallel_replicate_dim {replicate} x data_parallel_shard_dim {shard} x "
                f"tensor_parallel_dim {tensor} is not {shape}: set data_parallel_shard_dim=-1, or "
                "change one of them"
            )
        elif expert > 1 and ((shard * tensor) % expert or expert % tensor):
            faults.append(
                f"expert_parallel_dim {expert} must be a multiple of tensor_parallel_dim {tensor} "
                f"and divide the {shard * tensor} ranks of a replica: change it"
            )
        if faults:
            raise LayoutError(faults)
        return cls(replicate, shard, tensor, expert)


def model_faults(tensor_parallel: int, sizes: Mapping[str, int]) -> list[str]:
    """Return why a model cannot be split over so many ranks, one line per size.

    Args:
        sizes: by name, what tensor parallelism divides: num_heads, num_kv_heads,
            linear_num_key_heads, intermediate_dim, vocab_size, max_seq_len.
    """
    return [
        f"tensor_parallel_dim {tensor_parallel} does not divide the model's {name} {size}: choose "
        "a number that does"
        for name, size in sizes.items()
        if size % tensor_parallel
    ]
