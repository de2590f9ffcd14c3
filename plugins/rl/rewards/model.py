"""A reward model of `entry: reward` as a reward: frozen, whole on each GPU that trains."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from plugins.rl.recipe_keys import REWARD_MODEL, GrpoConfig
from runspec.files import patient_json
from runspec.weights import base_of, gives_scores
from trainer.checkpoint.weights import SafetensorsSource
from trainer.errors import ConfigError
from trainer.inference import loading
from trainer.parallel.world import World

# In the place of an answer, where the template is asked what follows one.
_ANSWER = "[[the answer]]"


def blocks(rewards: Mapping[str, Any]) -> dict[str, Path]:
    """The folders of the rewards that are models, by the reward's name."""
    return {
        name: Path(str(block.get("model")))
        for name, block in rewards.items()
        if isinstance(block, dict) and block.get("function") == REWARD_MODEL
    }


def faults(rewards: Mapping[str, Any], policy: Path) -> list[str]:
    """Why folders hold no reward model that scores the policy's tokens; no weights are read.

    Args:
        policy: the folder of the policy's tokenizer.
    """
    lines = []
    for name, folder in blocks(rewards).items():
        key = f"rewards.{name}.model"
        if not rewards[name].get("model"):
            lines.append(f"{key}: give the folder of a reward model, such as a run's export")
        elif not gives_scores(folder):
            lines.append(f"{key}: {folder} has no reward model; entry: reward makes one")
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
    """The folder itself, or that of an adapter's base if it has no tokenizer."""
    whole = (folder / "tokenizer.json").is_file()
    return folder if whole else base_of(folder) or folder


def _vocabulary(folder: Path) -> Any:
    content = patient_json(folder / "tokenizer.json") or {}
    added = sorted((each["id"], each["content"]) for each in content.get("added_tokens") or ())
    return (content.get("model") or {}).get("vocab"), added


def tail(tokenizer: Any) -> list[int]:
    """The tokens behind an answer's end token, as the chat template ends a conversation.

    Raises:
        ConfigError: the template leaves the answer out.
    """
    if not getattr(tokenizer, "has_chat_template", False):
        return []
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    text = tokenizer.render(turns)
    if _ANSWER not in text:
        raise ConfigError("tokenizer: the chat template leaves an answer out of a conversation")
    tokens: list[int] = tokenizer.encode(text.rpartition(_ANSWER)[2])
    return tokens[1:] if tokens and tokens[0] in tokenizer.ends else tokens


class RewardModel:
    """Scores documents at their last token.

    Args:
        rows: how many documents go through it at once.
        dtype: as in a config, such as bf16.

    Raises:
        ConfigError: transformers cannot load it.
    """

    def __init__(self, folder: Path, rows: int, dtype: str, device: torch.device) -> None:
        model = loading.reward_model(folder, dtype, device)
        if hasattr(model, "merge_and_unload"):
            model = model.merge_and_unload()
        if not hasattr(model, "score"):
            raise ConfigError(f"{folder}: {type(model).__name__} has no score head")
        self._model, self._rows, self._device = model.requires_grad_(False), rows, device

    def scores(self, documents: Sequence[Sequence[int]]) -> list[float]:
        """The score of each document."""
        # Answers of about the same length go through it together.
        order = sorted(range(len(documents)), key=lambda index: len(documents[index]))
        scores = [0.0] * len(documents)
        for begin in range(0, len(order), self._rows):
            part = order[begin : begin + self._rows]
            for index, score in zip(
                part, self._together([documents[i] for i in part]), strict=True
            ):
                scores[index] = score
        return scores

    @torch.inference_mode()
    def _together(self, documents: Sequence[Sequence[int]]) -> list[float]:
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


def loaded(config: GrpoConfig, world: World) -> dict[str, RewardModel]:
    """The reward models by the reward's name; none on a rank that has no answers.

    Raises:
        ConfigError: transformers cannot load one.
    """
    return {
        name: RewardModel(folder, config.batch_size, config.dtype, world.device)
        for name, folder in (blocks(config.rewards).items() if world.data_weight else ())
    }
