"""Peak memory of a step in torch's allocator: python -m tests.benchmarks.allocated TRAIN_YAML RANKS

For the null GPU. It runs the step that `trainer.trace` runs on fake tensors, here compiled and with
CUDA tensors, as rank 0 of a fake process group. The weights are not initialised.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer import config as configs
from trainer import optimizers, trace
from trainer.layers import fp8
from trainer.layers.loss import TokenLoss
from trainer.models import build as models
from trainer.parallel import gradients
from trainer.parallel.tensor_parallel import vocabulary_split_loss
from trainer.parallel.world import World, layout_of

STEPS = 3


def main(path: str, ranks: int) -> None:
    """Print one line of JSON: the peak of allocated bytes in the last step."""
    config, device = configs.load(Path(path)), torch.device("cuda", 0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    world = World(0, ranks, 0, device, None, layout_of(vars(config), ranks))
    loss, module = TokenLoss(config), models.empty(config)
    models.lay_out(module, config, world, loss.output_chunks)
    models.allocate(module, device, parameters_on_cpu=config.fsdp_cpu_offload)
    fp8.fill_magnitudes(module)
    module.train()
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = optimizers.build(config.optimizer, trained)
    batch = trace._batch(config, module)
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        for step in range(config.gradient_accumulation_steps):
            last = step + 1 == config.gradient_accumulation_steps
            gradients.set_gradient_sync(module, last=last, each=config.sync_each_micro_batch)
            with vocabulary_split_loss(world.tensor_parallel_dim):
                (loss(module, batch, device) * 0.5).backward()
        gradients.reduce_partial_gradients(trained)
        norm = gradients.gradient_norm(trained)
        gradients.clip_gradients(trained, norm, config.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    print(json.dumps({"peak": torch.cuda.max_memory_allocated()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
