"""Reward models: pairs scored at their last tokens, in every layout, and as others load them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, LlamaForSequenceClassification

from runspec.keys.fields import TRANSFORMERS
from runspec.keys.reward import RewardConfig
from tests.trainer.runs import (
    assert_same_curve,
    curve,
    finish,
    kill_rank,
    metrics,
    start,
    wait_for_step,
    write_config,
)
from trainer.config import parse, read_yaml
from trainer.data import batches
from trainer.objectives.reward import RewardModelling, document_scores, pair_loss
from trainer.parallel import world as distributed

MODULE = "trainer.reward"
FULL = {"_component_": TRANSFORMERS}
LORA = FULL | {"lora_rank": 4, "lora_alpha": 8}
PACKED = {"row_length": 96, "batch_size": 2}
# By name: ranks, the run that it equals, changes to the config.
RUNS: dict[str, tuple[int, str | None, dict[str, Any]]] = {
    "lora": (1, None, {"model": LORA}),
    "lora-fsdp": (2, "lora", {"model": LORA, "batch_size": 2}),
    "full": (1, None, {}),
    "full-tensor": (2, "full", {"tensor_parallel_dim": 2, "enable_activation_checkpointing": True}),
    "packed": (1, None, {"model": LORA | {"quantize_base": True}} | PACKED),
}
FIGURES = ("rewards/margins", "rewards/mean", "val_rewards/accuracies", "val_loss")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [
        {
            "prompt": f"Is node {i} up?",
            "chosen": "Yes, it is " + "very " * (i % 5) + "fast.",
            "rejected": "No" + ", really" * (i % 3) + ".",
            "margin": 0.5 * (i % 2),
        }
        for i in range(32)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(folder: Path, model_folder: Path, pairs: Path, **changes: Any) -> Path:
    standard = {
        "model": FULL,
        "max_steps": 4,
        "save_every_n_steps": 2,
        "run_val_every_n_steps": 2,
        "dataset_val": {"split": "train[24:]"},
        "data_cache_dir": str(folder.parent / "tokens"),
        "batch_size": 4,
        "center_rewards_coefficient": 0.01,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
    }
    path = write_config(folder, model_folder, pairs, **standard | changes)
    content = yaml.safe_load(path.read_text())
    content["dataset"] = {
        "_component_": "trainer.data.preferences.PreferenceDataset",
        "source": "json",
        "data_files": str(pairs),
        "split": "train[:24]",
        "packed": "row_length" in changes,
    }
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, pairs: Path) -> Path:
    """The folder in which every run lies by its name."""
    folder = tmp_path_factory.mktemp("reward")
    for name, (ranks, _, changes) in RUNS.items():
        path = config(folder / name, model_folder, pairs, **changes)
        finish(start(path, ranks, module=MODULE))
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_it_learns_which_answer_is_chosen(name: str, root: Path) -> None:
    first, *_, last = metrics(root / name)
    assert last["loss"] < first["loss"] < 1.5
    assert last["rewards/margins"] > first["rewards/margins"] + 0.1
    assert last["val_rewards/accuracies"] > 0.8


@pytest.mark.parametrize("name", [name for name, (_, wanted, _) in RUNS.items() if wanted])
def test_every_layout_equals_the_single_process(name: str, root: Path) -> None:
    wanted = root / str(RUNS[name][1])
    assert_same_curve(root / name, wanted, 2e-5, 1e-4)
    for own, other in zip(metrics(root / name), metrics(wanted), strict=True):
        for figure in FIGURES:
            # Not every line has the validation's.
            expected = pytest.approx(other.get(figure, 0), rel=2e-5, abs=2e-5)
            assert own.get(figure, 0) == expected
