"""A world of any number of ranks in one process, whose communication does nothing."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer.parallel.world import World, layout_of


class FakeWorld(World):
    """Rank 0 of ranks that all tell what it tells: the fake group leaves received memory unset."""

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size


@contextmanager
def fake_world(config: Mapping[str, Any], ranks: int) -> Iterator[World]:
    """Rank 0 of `ranks` on the CPU, laid out as `config` says, for as long as the context lasts.

    Raises:
        ConfigError: the layout does not fit the number of ranks.
    """
    layout = layout_of(config, ranks)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield FakeWorld(0, ranks, 0, torch.device("cpu"), None, layout)
    finally:
        dist.destroy_process_group()
