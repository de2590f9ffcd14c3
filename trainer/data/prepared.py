"""The dataset that cookbook prepare made: dataset=prepared:NAME@SPLIT."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runspec import files, prepared
from trainer.errors import ConfigError


def prepared_dataset(
    tokenizer: Any,
    *,
    data_dir: str,
    train_on_input: bool = False,
    packed: bool = False,
    **more: Any,
) -> Any:
    """A split of a prepared set, as torchtune's dataset for its format.

    Args:
        tokenizer: with tokenize_messages, or encode for plain texts.
        data_dir: the folder of the split's Parquet files.
        train_on_input: train on the prompt's tokens too.
        packed: taken from the config by the trainer's own packing; here it is always false.

    Raises:
        ConfigError: there is no such split, or its format is of another method.
    """
    folder = Path(data_dir)
    shards = sorted(str(path) for path in folder.glob("*.parquet"))
    if not shards:
        name = folder.parts[-4] if len(folder.parts) > 3 else folder.name
        version = folder.parent
        there = sorted(path.name for path in version.glob("*/")) if version.is_dir() else []
        words = f"it has {', '.join(there)}" if there else "prepare it with: cookbook prepare"
        raise ConfigError(f"dataset: no prepared set {name} with a split {folder.name}: {words}")
    card = _card(folder)
    common = {"source": "parquet", "data_files": shards, "split": "train", "packed": False, **more}
    if card["format"] == "text":
        from torchtune.datasets import text_completion_dataset

        return text_completion_dataset(tokenizer, column="text", **common)
    if card["format"] == "messages":
        from torchtune.datasets import chat_dataset

        return chat_dataset(
            tokenizer,
            conversation_column="messages",
            conversation_style="openai",
            train_on_input=train_on_input,
            **common,
        )
    raise ConfigError(
        f"dataset: {folder} holds preference pairs, which this method does not train on: "
        "prepare it "
        "with output.format=messages to train on the chosen answers"
    )


def _card(folder: Path) -> Mapping[str, Any]:
    card = files.read_json_or_none(folder.resolve().parent.parent / prepared.CARD)
    if not isinstance(card, dict):
        raise ConfigError(f"dataset: {folder} has no {prepared.CARD}: prepare it again")
    return card
