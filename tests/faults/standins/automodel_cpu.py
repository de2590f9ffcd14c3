"""NeMo Automodel on a CPU: a recipe of its own parts, as its training recipe calls torch.cuda.

Its command line, config, step scheduler with SIGTERM, SQuAD dataset, collator, masked
cross-entropy and checkpoints are Automodel's; the loop around them is written here, on gloo.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nemo_automodel.components.checkpoint.checkpointing import Checkpointer
from nemo_automodel.components.checkpoint.config import CheckpointingConfig
from nemo_automodel.components.datasets.llm.squad import make_squad_dataset
from nemo_automodel.components.datasets.utils import default_collater
from nemo_automodel.components.loggers.metric_logger import MetricsSample, build_metric_logger
from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
from nemo_automodel.components.training.step_scheduler import StepSchedulerConfig
from nemo_automodel.recipes.base_recipe import BaseRecipe
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer


class CpuRecipe(BaseRecipe):
    """Full fine-tuning with FSDP2; batch 4 per rank."""

    def __init__(self, config: Any) -> None:
        self.cfg = config

    def setup(self) -> None:
        dist.init_process_group("gloo")
        torch.manual_seed(1)
        folder = self.cfg.get("model.pretrained_model_name_or_path")
        self.peft_config = None
        self.checkpointer = Checkpointer(
            CheckpointingConfig(**self.cfg.get("checkpoint").to_dict()), dist.get_rank(), 0, 0
        )
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
        self.model_parts = [model]
        self.optimizer = [torch.optim.Adam(model.parameters(), lr=1e-3)]
        rows = make_squad_dataset(
            AutoTokenizer.from_pretrained(folder), dataset_name=self.cfg.get("dataset.dataset_name")
        )
        mine = torch.utils.data.Subset(
            rows, range(dist.get_rank(), len(rows), dist.get_world_size())
        )
        self.dataloader = StatefulDataLoader(
            mine, 4, collate_fn=default_collater, shuffle=False, drop_last=True
        )
        steps = self.cfg.get("step_scheduler").to_dict()
        local = steps.pop("local_batch_size")
        self.step_scheduler = StepSchedulerConfig(**steps).build(
            self.dataloader, dist.get_world_size(), local
        )
        self.load_checkpoint()
        self.log = build_metric_logger(
            Path(self.checkpointer.config.checkpoint_dir) / "training.jsonl"
        )

    def run_train_validation_loop(self) -> None:
        (model,), (optimizer,), loss_of = self.model_parts, self.optimizer, MaskedCrossEntropy()
        for epoch in self.step_scheduler.epochs:
            self.step_scheduler.set_epoch(epoch)
            for batches in self.step_scheduler:
                total = torch.zeros(())
                for batch in batches:
                    logits = model(batch["input_ids"]).logits
                    loss = loss_of(logits, batch["labels"]) / len(batches)
                    loss.backward()
                    total += loss.detach()
                optimizer.step()
                optimizer.zero_grad()
                dist.all_reduce(total, dist.ReduceOp.SUM)
                step, mean = self.step_scheduler.step, total.item() / dist.get_world_size()
                if dist.get_rank() == 0:
                    self.log.log(MetricsSample(step, epoch, {"loss": mean}))
                    self.log.flush()
                if self.step_scheduler.is_ckpt_step:
                    self.save_checkpoint(epoch, step, mean)
        self._finalize_and_close_checkpointer()
        dist.destroy_process_group()
