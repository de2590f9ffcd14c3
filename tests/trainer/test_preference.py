"""Preference tuning: pairs and labelled answers, in every layout, with each kind of reference."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks import preference
from tests.trainer.runs import (
    assert_same_curve,
    finish,
    lora_model,
    metrics,
    start,
    write_config,
)

LORA = lora_model(lora_dropout=0.0)
SLOW = {"optimizer": {"_component_": "torch.optim.AdamW", "lr": 3e-4}}
PAIRS = "trainer.data.preferences.PreferenceDataset"
UNPAIRED = "trainer.data.preferences.UnpairedPreferenceDataset"
KTO = {"module": "trainer.kto"}
# By name: ranks, the run that it equals, changes to the config.
RUNS: dict[str, tuple[int, str | None, dict[str, Any]]] = {
    "lora": (1, None, {"model": LORA, "epochs": 1}),
    "lora-kept": (1, "lora", {"model": LORA, "reference": "log_probs"}),
    "lora-model": (1, "lora", {"model": LORA, "reference": "model"}),
    "lora-tensor": (2, "lora", {"model": LORA, "epochs": 1, "tensor_parallel_dim": 2}),
    "full": (1, None, SLOW),
    "full-model": (2, "full", SLOW | {"batch_size": 2, "reference": "model"}),
    "full-tensor": (2, "full", SLOW | {"tensor_parallel_dim": 2}),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [
        {
            "prompt": f"Is node {i} up?",
            "chosen": "Yes, it is " + "very " * (i % 5) + "fast.",
            "rejected": "No" + ", really" * (i % 3) + ".",
        }
        for i in range(32)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(
    folder: Path, model_folder: Path, pairs: Path, component: str = PAIRS, **changes: Any
) -> Path:
    standard = {
        "max_steps": 4,
        "save_every_n_steps": 2,
        "run_val_every_n_steps": 2,
        "dataset_val": {"split": "train[24:]"},
        "data_cache_dir": str(folder.parent / "tokens"),
        "batch_size": 4,
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


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, pairs: Path) -> Path:
    """The folder in which every run lies by its name."""
    folder = tmp_path_factory.mktemp("preference")
    lines = {
        "adapter_off": "the policy with its adapter off",
        "log_probs": "log-probabilities of the policy before training",
        "model": "frozen, 1,",
    }
    for name, (ranks, _, changes) in RUNS.items():
        path = config(folder / name, model_folder, pairs, **changes)
        output = finish(start(path, ranks, module="trainer.dpo"))
        kind = changes.get("reference", "adapter_off" if "lora" in name else "log_probs")
        assert f"reference  {lines[kind]}" in output
        assert "5.8 tokens longer than rejected ones on average" in output
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_it_begins_at_its_reference_and_learns(name: str, root: Path) -> None:
    first, *_, last = metrics(root / name)
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert last["rewards/margins"] > 0.1 and last["rewards/accuracies"] == 1.0
    assert last["val_loss"] < 0.65 and last["val_rewards/margins"] > 0.1


@pytest.mark.parametrize("name", [name for name, (_, wanted, _) in RUNS.items() if wanted])
def test_every_layout_and_reference_gives_the_same_run(name: str, root: Path) -> None:
    wanted = root / str(RUNS[name][1])
    assert_same_curve(root / name, wanted, 2e-5, 1e-4)
    for own, other in zip(metrics(root / name), metrics(wanted), strict=True):
        for figure in ("rewards/margins", "logps/chosen", "val_rewards/margins", "val_loss"):
            assert (figure in own) == (figure in other)
            assert own.get(figure, 0) == pytest.approx(other.get(figure, 0), rel=2e-5, abs=2e-5)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What benchmarks.preference gave TRL: model, adapter, pairs and labelled answers."""
    folder = tmp_path_factory.mktemp("trl")
    model = preference.make_model(folder / "model")
    preference.make_adapter(folder / "adapter", model)
    preference.write_pairs(folder / "pairs.jsonl")
    preference.write_labelled(folder / "labelled.jsonl")
    return folder


@pytest.mark.parametrize("name", json.loads(preference.CURVES.read_text())["losses"])
def test_its_curves_are_those_of_trl(name: str, texts: Path, tmp_path: Path) -> None:
    """20 steps in fp32; python -m benchmarks.preference curves writes TRL's."""
    method, _, kind = name.partition("-")
    data = texts / ("labelled.jsonl" if method == "kto" else "pairs.jsonl")
    adapter = texts / "adapter" if kind == "lora" else None
    path = preference.our_config(tmp_path, texts / "model", data, method, adapter)
    finish(start(path, 1, module="trainer.kto" if method == "kto" else "trainer.dpo"))
    wanted = json.loads(preference.CURVES.read_text())["losses"][name]
    losses = [row["loss"] for row in metrics(tmp_path)]
    assert losses == pytest.approx(wanted, rel=1e-5, abs=1e-5)
