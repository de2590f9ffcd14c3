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
        self.tokenizer_folder = folder if own else base_of(folder) or folder
        self.device = device

    @torch.inference_mode()
    def value(self, tokens: Sequence[int], labels: Sequence[int] = ()) -> float:
        """The score at the last token of a document, whatever its labels are."""
        ids = torch.tensor([list(tokens)], device=self.device)
        return float(self.model(input_ids=ids).logits[0, 0])


def model_of(
    folder: Path, settings: dict[str, Any], device: torch.device, spread: bool = False
) -> "Answerer | Scorer":
    """The model of a folder: one that answers, or one that gives scores."""
    if not gives_scores(folder):
        return Answerer(folder, settings, device, spread)
    if spread:
        raise ConfigError(f"{folder}: a reward model has to fit one GPU; use larger GPUs")
    return Scorer(folder, settings, device)


def values(model: "Answerer | Scorer", samples: Sequence[Sample]) -> list[dict[str, float]]:
    """What a model gives chosen and rejected of each sample: scores, or log-probabilities.

    Args:
        samples: a sample's only message is the record of its pair.
    """
    pairs = Pairs(model.tokenizer_folder, [sample.messages[0] for sample in samples])
    return [
        {
            name: model.value(pair[f"{name}_input_ids"], pair[f"{name}_labels"])
            for name in ("chosen", "rejected")
        }
        for pair in (pairs[index] for index in range(len(samples)))
    ]
