"""A training method in one file: of two answers to a question, prefer the first.

torchrun ... -m trainer.train tests.trainer.methods.toy_objective:ToyConfig <run>/train.yaml

With a(answer) the mean log-probability of its tokens and a_ref that of the policy before training,
the loss of a pair is weight x relu(hinge - D), D = (a - a_ref)(first) - (a - a_ref)(second).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.utils.data import Dataset

from runspec.keys.key import setting
from runspec.keys.train import TrainConfig
from trainer.data.form import SampleForm
from trainer.layers.batch import IGNORE_INDEX, MicroBatch
from trainer.layers.log_probs import document_sums, token_log_probs
from trainer.methods.base import LossSum, Models, Objective


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ToyConfig(TrainConfig):
    """Keys of the method, and what the launcher knows of it."""

    objective: ClassVar[str] = "tests.trainer.methods.toy_objective.PreferFirst"
    documents_per_sample: ClassVar[int] = 2
    has_reference: ClassVar[bool] = True

    hinge: float = setting("number", "Margin from which a pair has no loss.", 1.0)


class Pairs(Dataset):
    """Records of JSON lines with a question, a first and a second answer, and perhaps a weight."""

    def __init__(self, tokenizer: Any, *, source: str, data_files: Any, split: str) -> None:
        from datasets import load_dataset

        self._tokenizer = tokenizer
        self._data = load_dataset(source, data_files=data_files, split=split)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = self._data[index]
        sample: dict[str, Any] = {"weight": record.get("weight") or 1.0}
        question = self._tokenizer.encode(record["question"], add_bos=True)
        for name in ("first", "second"):
            answer = self._tokenizer.encode(" " + record[name], add_eos=True)
            sample[f"{name}_tokens"] = question + answer
            sample[f"{name}_labels"] = [IGNORE_INDEX] * len(question) + answer
        return sample


class PreferFirst(Objective):
    """The mean over pairs; its figures: D, the share of pairs with D > 0, the weight."""

    config_class: ClassVar[type[TrainConfig]] = ToyConfig
    form: ClassVar[SampleForm] = SampleForm(
        documents=(("first_tokens", "first_labels"), ("second_tokens", "second_labels")),
        number="weight",
        preferences="tests.trainer.methods.toy_objective.Pairs",
    )
    normaliser = "samples"

    @classmethod
    def faults(cls, config: ToyConfig) -> list[str]:
        own = [] if config.hinge <= 10 else ["hinge: must be at most 10"]
        return super().faults(config) + own

    def loss(self, models: Models, batch: MicroBatch) -> LossSum:
        batch = batch.to(self.world.device)
        with models.as_reference() as reference:
            before = self._means(reference, batch)
        margin = (self._means(models.policy.module, batch) - before) @ before.new_tensor([1, -1])
        total = (batch.numbers * torch.relu(self.config.hinge - margin)).sum()
        margin = margin.detach()
        figures = {"margin": margin, "pairs/preferred": margin > 0, "weight": batch.numbers}
        return LossSum(total, {name: value.sum() for name, value in figures.items()})

    def _means(self, model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
        """The mean log-probability of each answer's tokens, [pairs, 2]."""
        log_probs = token_log_probs(model, batch)
        counts = document_sums(torch.ones_like(log_probs), batch)
        return document_sums(log_probs, batch) / counts.clamp_min(1)
