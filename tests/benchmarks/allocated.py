"""Peak memory of a step in torch's allocator: python -m tests.benchmarks.allocated FILE RANKS KIND

For the null GPU. It runs the step that `plugins.estimate.trace` runs on fake tensors, here compiled
and with CUDA tensors, as rank 0 of a fake process group. FILE is a train.yaml, KIND the dotted path
of its objective. The weights are not initialised.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from plugins.estimate import trace
from trainer import config as configs
from trainer import groups, optimizers
from trainer.config import TrainConfig
from trainer.layers.adapters.base import method as method_of
from trainer.methods.base import named
from trainer.models import build as models
from trainer.models.builder import Builder
from trainer.parallel import gradients
from trainer.parallel.world import World, layout_of

STEPS = 3


class Alone(World):
    """A rank whose others say what it says."""

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size


class Unread(Builder):
    """Makes models without reading weights."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        self.config, self.world, self.fingerprints = config, world, {}

    def _built(self, config: TrainConfig, frozen: bool) -> models.Model:
        module = models.cut(models.empty(config, frozen), config.first_blocks)
        models.lay_out(module, config, self.world, frozen)
        offloads = config.fsdp_cpu_offload
        models.allocate(module, self.world.device, parameters_on_cpu=offloads)
        module.train(not frozen)
        return models.Model(module, method_of(module), models.DTYPES[config.dtype])

    def _fingerprint(self, config: TrainConfig) -> str:
        return ""


def main(path: str, ranks: int, objective: str) -> None:
    """Print one line of JSON: the peak of allocated bytes in the last step."""
    kind = named(objective)
    config, device = configs.load(Path(path), kind.config_class), torch.device("cuda", 0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    world = Alone(0, ranks, 0, device, None, layout_of(vars(config), ranks))
    method = kind(config, world)
    made = method.build_models(Unread(config, world))
    module = made.policy.module
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = optimizers.build(config.optimizer, groups.trained_of(module))
    batch = trace._batch(config, module)
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        for step in range(config.gradient_accumulation_steps):
            last = step + 1 == config.gradient_accumulation_steps
            gradients.set_gradient_sync(module, last=last, each=config.sync_each_micro_batch)
            (method.loss(made, batch).total * 0.5).backward()
        gradients.reduce_partial_gradients(trained)
        norm = gradients.gradient_norm(trained)
        gradients.clip_gradients(trained, norm, config.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    print(json.dumps({"peak": torch.cuda.max_memory_allocated()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
