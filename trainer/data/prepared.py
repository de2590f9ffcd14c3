"""The dataset that cookbook prepare made: dataset=prepared:NAME@SPLIT."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from runspec import prepared
from runspec.keys.fields import STREAM
from trainer.errors import ConfigError

_BY_FORMAT = {
    "text": {"_component_": "torchtune.datasets.text_completion_dataset", "column": "text"},
    "messages": {
        "_component_": "torchtune.datasets.chat_dataset",
        "conversation_column": "messages",
        "conversation_style": "openai",
    },
}
# The last part of the names of components for plain texts.
_TEXTS = (
    "text_completion_dataset",
    "wikitext_dataset",
    "cnn_dailymail_articles_dataset",
    STREAM.rpartition(".")[2],
)


def by_files(block: Mapping[str, Any], preferences: str = "") -> dict[str, Any]:
    """Return a dataset block that names the files of a prepared split, and how they are read.

    Args:
        block: has `data_dir`, the folder of the split's Parquet files.
        preferences: the component that reads preference pairs; "" refuses them.

    Raises:
        ConfigError: there is no such split, or its format is of another method.
    """
    folder = Path(str(block["data_dir"]))
    shards = sorted(str(path) for path in folder.glob("*.parquet"))
    if not shards:
        name = folder.parts[-4] if len(folder.parts) > 3 else folder.name
        version = folder.parent
        there = sorted(path.name for path in version.glob("[!_]*/")) if version.is_dir() else []
        hint = f"it has {', '.join(there)}" if there else "prepare it with: cookbook prepare"
        raise ConfigError(f"dataset: no prepared set {name} with a split {folder.name}: {hint}")
    pairs = {"preference": {"_component_": preferences}} if preferences else {}
    if (found := prepared.version_of(folder)) is None:
        raise ConfigError(f"dataset: {folder} has no {prepared.CARD}: prepare it again")
    read = (_BY_FORMAT | pairs).get(found[1]["format"])
    if read is None:
        raise ConfigError(
            f"dataset: {folder} contains preference pairs, which this method does not train on: "
            "prepare it with output.format=messages to train on the chosen answers"
        )
    # A dataset of plain text has no prompt that could be left out.
    own = {"_component_", "data_dir", *(["train_on_input"] if "column" in read else [])}
    others = {key: value for key, value in block.items() if key not in own}
    return {**read, "source": "parquet", "data_files": shards, "split": "train", **others}


def is_text(block: Mapping[str, Any]) -> bool:
    """Whether a dataset block names plain texts, which no chat template renders."""
    if block.get("_component_") == prepared.COMPONENT:
        with suppress(ConfigError):  # gone since it was read
            block = by_files(block, preferences="preferences")
    return str(block.get("_component_")).rpartition(".")[2] in _TEXTS
