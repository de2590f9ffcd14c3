"""Pairs of answers, and configs that train on them, for the tests of methods that compare."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.trainer.runs import write_config

NAMES = ("prompt", "chosen", "rejected")


def write_pairs(
    path: Path, names: tuple[str, str, str] = NAMES, **more: Callable[[int], Any]
) -> Path:
    """32 pairs; `more` gives further columns by the number of a pair."""
    prompt, chosen, rejected = names
    rows = [
        {
            prompt: f"Is node {i} up?",
            chosen: "Yes, it is " + "very " * (i % 5) + "fast.",
            rejected: "No" + ", really" * (i % 3) + ".",
            **{name: value(i) for name, value in more.items()},
        }
        for i in range(32)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pairs_config(
    folder: Path, model_folder: Path, pairs: Path, component: str, **changes: Any
) -> Path:
    """A train.yaml for 24 of the pairs, with the others for validation; returns its path."""
    standard = {
        "max_steps": 4,
        "save_every_n_steps": 2,
        "run_val_every_n_steps": 2,
        "dataset_val": {"split": "train[24:]"},
        "data_cache_dir": str(folder.parent / "tokens"),
    }
    path = write_config(folder, model_folder, pairs, **standard | changes)
    content = yaml.safe_load(path.read_text())
    content["dataset"] = {
        "_component_": component,
        "source": "json",
        "data_files": str(pairs),
        "split": "train[:24]",
        "packed": "row_length" in changes,
    }
    path.write_text(yaml.safe_dump(content))
    return path
