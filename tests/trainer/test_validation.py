"""The validation loss by itself: without dropout, and without a trace in the training."""

from pathlib import Path

import torch

from tests.trainer.runs import ROOT, lora_model, write_config
from trainer.config import load
from trainer.loop import Trainer
from trainer.methods.sft import SupervisedFineTuning
from trainer.parallel import world as distributed

QUESTIONS = ROOT / "configs/datasets/slurm_qa.jsonl"


def test_it_is_the_same_each_time_and_leaves_no_trace(
    tmp_path: Path, model_folder: Path, dataset: Path
) -> None:
    path = write_config(
        tmp_path,
        model_folder,
        dataset,
        model=lora_model(lora_dropout=0.5),
        dataset_val={"data_files": str(QUESTIONS), "split": "train[:8]"},
    )
    try:
        trainer = Trainer(load(path), distributed.start("cpu"), 0, SupervisedFineTuning)
        # B is zero at first, and what dropout does to A's input would not be seen.
        with torch.no_grad():
            for name, parameter in trainer.model.module.named_parameters():
                if "lora_b" in name:
                    parameter.normal_(std=0.1)
        before = torch.get_rng_state()
        assert trainer._validate() == trainer._validate()
        assert torch.equal(torch.get_rng_state(), before)
        assert trainer.model.module.training
        assert all(parameter.grad is None for parameter in trainer.model.trainable)
    finally:
        distributed.stop()
