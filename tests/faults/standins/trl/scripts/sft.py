"""A script of TRL's around transformers' own Trainer: python -m trl.scripts.sft --config FILE

It calls train() without a checkpoint, as TRL's does, and saves the model to args.output_dir.
"""

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


@dataclass
class Script:
    model_name_or_path: str = ""
    dataset_name: str = ""


def make_parser() -> argparse.Namespace:
    return argparse.Namespace(dataclass_types=(Script, TrainingArguments))


class Rows(Dataset):
    """Token ids that differ by row."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(16).mul(row + 1) % 97
        return {"input_ids": tokens, "labels": tokens}


class PrintsTokens(Trainer):
    """Logs the number of tokens as TRL's trainers do."""

    def training_step(self, *args, **options) -> torch.Tensor:
        """A step after the first checkpoint takes a second until HURRY, if named, exists."""
        hurry = os.environ.get("HURRY")
        until = time.monotonic() + (1 if hurry and self.state.global_step >= 8 else 0)
        while time.monotonic() < until and not Path(hurry).exists():
            time.sleep(0.05)
        return super().training_step(*args, **options)

    def log(self, logs, *args, **options) -> None:
        seen = self.state.global_step * 16 * 4 * self.args.world_size
        super().log({**logs, "num_tokens": seen}, *args, **options)


def main() -> None:
    given = yaml.safe_load(Path(sys.argv[2]).read_text())
    given = {key: given[key] for key in given if key not in ("model_name_or_path", "dataset_name")}
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 97}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    arguments = TrainingArguments(**given, per_device_train_batch_size=4)
    trainer = PrintsTokens(LlamaForCausalLM(config), arguments, train_dataset=Rows())
    trainer.train()
    trainer.save_model(arguments.output_dir)


if __name__ == "__main__":
    main()
