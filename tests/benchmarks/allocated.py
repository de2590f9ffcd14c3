"""A step's peak by torch's allocator: python -m tests.benchmarks.allocated <train.yaml> <ranks>.

For the null GPU: what `trainer.trace` runs on fake tensors runs here as on a GPU, compiled;
rank 0 of a process group that only pretends. Weights are made, not read.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer import config as configs
from trainer import fp8, models, nf4, optimizers, parallel, trace
from trainer.distributed import World
from trainer.loss import TokenLoss
from trainer.tensor_parallel import vocabulary_split_loss

STEPS = 3


def main(path: str, ranks: int) -> None:
    """Print one line of JSON: the bytes of all tensors at the peak of a step after the first."""
    config, device = configs.load(Path(path)), torch.device("cuda", 0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    copies, split = config.data_parallel_replicate_dim, config.tensor_parallel_dim
    world = World(0, ranks, 0, device, None, split, copies)
    loss, module = TokenLoss(config), models.empty(config)
    models.lay_out(module, config, world, loss.output_chunks)
    models._allocate(module, device, parameters_on_cpu=config.fsdp_cpu_offload)
    models.fill_rope_caches(module, device)
    nf4.fill_tables(module)
    fp8.fill_magnitudes(module)
    module.train()
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = optimizers.build(config.optimizer, trained)
    batch = trace._batch(config, module)
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        for step in range(config.gradient_accumulation_steps):
            last = step + 1 == config.gradient_accumulation_steps
            parallel.set_gradient_sync(module, last=last, each=config.sync_each_micro_batch)
            with vocabulary_split_loss(split):
                (loss(module, batch, device) * 0.5).backward()
        parallel.sum_shares(trained)
        parallel.clip_gradients(trained, config.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    print(json.dumps({"peak": torch.cuda.max_memory_allocated()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
