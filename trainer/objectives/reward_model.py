"""A reward model of `entry: reward` as a reward: frozen, whole on one GPU.

It is beside the policy, or with `served` on each replica of the rollout nodes, which are asked.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from runspec.keys.grpo import REWARD_MODEL, GrpoConfig
from runspec.storage import patient_json
from runspec.weights import base_of, gives_scores
from trainer.errors import ConfigError
from trainer.objectives.replicas import Failed, Replicas
from trainer.parallel.world import World
from trainer.storage.weights import SafetensorsSource

NEEDS_NODES = "only rollout nodes serve it; set resources.rollout=1 or more, or served=false"


def blocks(rewards: Mapping[str, Any]) -> dict[str, Path]:
    """The folders of the rewards that are models, by the reward's name."""
    return {
        name: Path(str(block.get("model")))
        for name, block in rewards.items()
        if isinstance(block, dict) and block.get("function") == REWARD_MODEL
    }


def served(rewards: Mapping[str, Any]) -> dict[str, Path]:
    """Those of `blocks` that the replicas hold."""
    return {name: folder for name, folder in blocks(rewards).items() if rewards[name].get("served")}


def faults(rewards: Mapping[str, Any], policy: Path) -> list[str]:
    """Why folders hold no reward model that scores the policy's tokens; no weights are read.

    Args:
        policy: the folder of the policy's tokenizer.
    """
    lines = []
    for name, folder in blocks(rewards).items():
        key = f"rewards.{name}.model"
        if not isinstance(asked := rewards[name].get("served", False), bool):
            lines.append(f"rewards.{name}.served: must be true or false, got {asked!r}")
        if not rewards[name].get("model"):
            lines.append(f"{key}: give the folder of a reward model, such as a run's export")
        elif not gives_scores(folder):
            lines.append(f"{key}: {folder} holds no reward model; entry: reward makes one")
        elif _vocabulary(_tokenizer_folder(folder)) != _vocabulary(policy):
            lines.append(
                f"{key}: {folder} has another tokenizer than the policy, and it scores the tokens "
                "as they were drawn; take one that was trained from the same family of models"
            )
    return lines


def fingerprints(rewards: Mapping[str, Any]) -> dict[str, str]:
    """What changes with the weights of each model, whatever its folder is called."""
    return {
        name: SafetensorsSource.open({"checkpoint_dir": str(folder)}).fingerprint()
        for name, folder in blocks(rewards).items()
    }


def _tokenizer_folder(folder: Path) -> Path:
    """The folder itself, or that of an adapter's base if it holds no tokenizer."""
    whole = (folder / "tokenizer.json").is_file()
    return folder if whole else base_of(folder) or folder


def _vocabulary(folder: Path) -> Any:
    content = patient_json(folder / "tokenizer.json") or {}
    added = sorted((each["id"], each["content"]) for each in content.get("added_tokens") or ())
    return (content.get("model") or {}).get("vocab"), added


def batches(documents: Sequence[Sequence[int]], rows: int) -> Iterator[list[int]]:
    """Indices of documents that go through a model at once: of about the same length."""
    order = sorted(range(len(documents)), key=lambda index: len(documents[index]))
    for begin in range(0, len(order), rows):
        yield order[begin : begin + rows]


class RewardModel:
    """Scores documents at their last token.

    Args:
        dtype: as in a config, such as bf16.

    Raises:
        ConfigError: transformers cannot load it.
    """

    def __init__(self, folder: Path, dtype: str, device: torch.device) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from trainer.evaluation import pairs

        model = pairs.Scorer(folder, {"dtype": dtype}, device).model
        if hasattr(model, "merge_and_unload"):
            model = model.merge_and_unload()
        if not hasattr(model, "score"):
            raise ConfigError(f"{folder}: {type(model).__name__} has no score head")
        self._model, self._device = model.requires_grad_(False), device

    @torch.inference_mode()
    def scores(self, documents: Sequence[Sequence[int]]) -> list[float]:
        """The score of each; all go through it at once."""
        lengths = torch.tensor([len(tokens) for tokens in documents])
        ids = torch.zeros(len(documents), int(lengths.max()), dtype=torch.int64)
        for row, tokens in enumerate(documents):  # padded on the right: no token sees later ones
            ids[row, : lengths[row]] = torch.tensor(tokens)
        mask = (torch.arange(ids.shape[1]) < lengths.unsqueeze(1)).to(ids)
        output = self._model.base_model(
            input_ids=ids.to(self._device),
            attention_mask=mask.to(self._device),
            use_cache=False,
        )
        last = output.last_hidden_state[torch.arange(len(documents)), lengths - 1]
        scores: list[float] = self._model.score(last)[:, 0].tolist()
        return scores


class Scorer:
    """A reward model as a rank asks it, a batch of documents at a time.

    Args:
        ask: the scores of each batch, or why there are none.
        failed: told of each score that there is not: its kind, and why.
    """

    def __init__(
        self,
        ask: Callable[[list[list[list[int]]]], Iterable[list[float] | Failed]],
        rows: int,
        failed: Callable[[str, str], None],
    ) -> None:
        self._ask, self._rows, self._failed = ask, rows, failed

    def scores(self, documents: Sequence[Sequence[int]]) -> list[float | None]:
        """The score of each document; None for one that failed."""
        places = [*batches(documents, self._rows)]
        scores: list[float | None] = [None] * len(documents)
        asked = [[[*documents[index]] for index in part] for part in places]
        for part, given in zip(places, self._ask(asked), strict=True):
            for place, index in enumerate(part):
                if isinstance(given, Failed):
                    self._failed(given.kind, given.said)
                else:
                    scores[index] = given[place]
        return scores


def scorers(
    config: GrpoConfig,
    world: World,
    replicas: Replicas | None,
    failed: Callable[[str, str, str], None],
) -> dict[str, Scorer]:
    """The reward models by the reward's name; none on a rank that has no answers.

    Args:
        failed: as of `Scorer`, behind the reward's name.

    Raises:
        ConfigError: transformers cannot load one; nothing serves one.
    """
    found: dict[str, Scorer] = {}
    apart, timeout_s = served(config.rewards), config.reward_timeout
    for name, folder in blocks(config.rewards).items() if world.data_weight else ():
        if name not in apart:
            model = RewardModel(folder, config.dtype, world.device)
            ask: Any = partial(map, model.scores)
        elif replicas is not None and not replicas.in_turns:
            ask = partial(replicas.score, name, timeout_s)
        else:
            raise ConfigError(f"rewards.{name}.served: {NEEDS_NODES}")
        found[name] = Scorer(ask, config.batch_size, partial(failed, name))
    return found
