"""Pairs of answers: by a reward model's scores, or by likelihood."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from plugins.evaluate.model import Answerer
from plugins.evaluate.samples import Sample
from runspec.weights import base_of, gives_scores
from trainer.data.preferences import PreferenceDataset
from trainer.data.tokenizers import hugging_face_tokenizer
from trainer.errors import ConfigError
from trainer.inference import loading
from trainer.layers.batch import IGNORE_INDEX


class Pairs(PreferenceDataset):
    """Pairs as training reads them, of records instead of a dataset; see PreferenceDataset."""

    def __init__(self, folder: Path, records: Sequence[Mapping[str, Any]]) -> None:
        # The parent would load a dataset.
        self._columns = {name: name for name in self.names}
        self._tokenizer = hugging_face_tokenizer(str(folder))
        self.rows = list(records)


class Scorer:
    """A reward model on one device.

    Raises:
        ConfigError: the folder has no reward model that transformers can load.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], device: torch.device) -> None:
        self.model = loading.reward_model(folder, settings["dtype"], device)
        # An adapter has a tokenizer of its own if the base has another one.
        own = (folder / "tokenizer.json").is_file()
        self.folder = folder if own else base_of(folder) or folder
        self.device = device

    @torch.inference_mode()
    def scores(self, documents: Sequence[Sequence[int]]) -> list[float]:
        """The score at the last token of each document, which is given by its tokens."""
        scores = []
        for tokens in documents:
            ids = torch.tensor([list(tokens)], device=self.device)
            scores.append(float(self.model(input_ids=ids).logits[0, 0]))
        return scores

    def pairs(self, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """The scores of chosen and rejected of each sample, whose record is its only message."""
        read = Pairs(self.folder, [sample.messages[0] for sample in samples])
        rows = []
        for index in range(len(samples)):
            pair = read[index]
            both = self.scores([pair["chosen_input_ids"], pair["rejected_input_ids"]])
            rows.append(dict(zip(("chosen", "rejected"), both, strict=True)))
        return rows


def model_of(
    folder: Path, settings: dict[str, Any], device: torch.device, ranks: int = 1
) -> "Answerer | Scorer":
    """The model of a folder: one that answers, over `ranks`, or one that gives scores."""
    if not gives_scores(folder):
        return Answerer(folder, settings, device, ranks)
    if ranks > 1:
        raise ConfigError(f"{folder}: a reward model has to fit one GPU; use larger GPUs")
    return Scorer(folder, settings, device)


def preferences(model: "Answerer | Scorer", samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """What a model gives chosen and rejected of each sample: scores, or log-probabilities."""
    return model.pairs(samples) if isinstance(model, Scorer) else _likelihoods(model, samples)


@torch.inference_mode()
def _likelihoods(answerer: Answerer, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    read = Pairs(answerer.base, [sample.messages[0] for sample in samples])
    rows = []
    for index in range(len(samples)):
        pair, sums = read[index], {}
        for name in ("chosen", "rejected"):
            ids = torch.tensor([pair[f"{name}_input_ids"]], device=answerer.device)
            labels = torch.tensor(pair[f"{name}_labels"], device=answerer.device)
            logits = answerer.model(input_ids=ids).logits[0, :-1].float()
            nll = torch.nn.functional.cross_entropy(
                logits, labels[1:], reduction="sum", ignore_index=IGNORE_INDEX
            )
            sums[name] = -float(nll)
        rows.append(sums)
    return rows
