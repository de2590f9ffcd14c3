"""Preference tuning: pairs and labelled answers, with each kind of reference."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import preference
from tests.trainer.methods.pairs import pairs_config, write_pairs
from tests.trainer.runs import Runs, assert_same_curve, finish, lora_model, metrics, start

LORA = lora_model(lora_dropout=0.0)
NEVER = {"_component_": "torch.optim.AdamW", "lr": 0.0}
SLOW = {"optimizer": {"_component_": "torch.optim.AdamW", "lr": 3e-4}}
PAIRS = "trainer.data.preferences.PreferenceDataset"
UNPAIRED = "trainer.data.preferences.UnpairedPreferenceDataset"
BASES: dict[str, dict[str, Any]] = {"lora": {"model": LORA, "epochs": 1}, "full": SLOW}
# Ranks, and changes; each run says where its reference comes from.
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "lora-fsdp": (2, {"batch_size": 2}),
    "full-fsdp": (2, {"batch_size": 2}),
}
SAID = {"lora": "the policy with its adapter off", "full": "frozen, 1,"}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    return write_pairs(path)


def config(
    folder: Path, model_folder: Path, pairs: Path, component: str = PAIRS, **changes: Any
) -> Path:
    return pairs_config(folder, model_folder, pairs, component, **{"batch_size": 4} | changes)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, model_folder, pairs):
    def write(folder: Path, **changes: Any) -> Path:
        return config(folder, model_folder, pairs, **changes)

    return Runs(tmp_path_factory.mktemp("preference"), write, BASES, KINDS, "dpo")


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_reference_gives_the_same_run(name, runs):
    base = runs.base(name)
    assert_same_curve(runs[name], runs[base], 2e-5, 1e-4)
    for own, other in zip(metrics(runs[name]), metrics(runs[base]), strict=True):
        for figure in ("rewards/margins", "logps/chosen", "val_rewards/margins", "val_loss"):
            assert (figure in own) == (figure in other)
            assert own.get(figure, 0) == pytest.approx(other.get(figure, 0), rel=2e-5, abs=2e-5)
    for run in (name, base):
        assert f"reference  {SAID[base]}" in runs.said[run]
        assert "5.8 tokens longer than rejected ones on average" in runs.said[run]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """What benchmarks.preference gave TRL: model, adapter, pairs and labelled answers."""
    folder = tmp_path_factory.mktemp("trl")
    model = preference.make_model(folder / "model")
    preference.make_adapter(folder / "adapter", model)
    preference.write_pairs(folder / "pairs.jsonl")
    preference.write_labelled(folder / "labelled.jsonl")
    return folder


CURVES = json.loads(preference.CURVES.read_text())["losses"]


QUICK = ("dpo-lora", "kto-full")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name not in QUICK))
        for name in CURVES
        if "gkd" not in name
    ],
)
def test_its_curves_are_those_of_trl(name, texts, tmp_path):
    """20 steps in fp32; python -m benchmarks.preference curves writes TRL's."""
    method, _, kind = name.partition("-")
    data = texts / ("labelled.jsonl" if method == "kto" else "pairs.jsonl")
    adapter = texts / "adapter" if kind == "lora" else None
    path = preference.our_config(tmp_path, texts / "model", data, method, adapter)
    finish(start(path, 1, module="trainer.train kto" if method == "kto" else "trainer.train dpo"))
    losses = [row["loss"] for row in metrics(tmp_path)]
    assert losses == pytest.approx(CURVES[name], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", ["orpo", "kto"])
def test_packed_equals_padded(name, tmp_path, model_folder, pairs):
    """Figures of one pass over dataset_val: a packed row holds other samples together."""
    component = UNPAIRED if name == "kto" else PAIRS
    module = f"trainer.train {'kto' if name == 'kto' else 'dpo'}"
    rate = {"optimizer": SLOW["optimizer"] | {"lr": 0.0}}
    found = []
    for packed in ({}, {"row_length": 256}):
        changes = rate | {"max_steps": 1, "run_val_every_n_steps": 1} | packed
        changes |= {"loss": "orpo"} if name == "orpo" else {}
        path = config(tmp_path / str(len(packed)), model_folder, pairs, component, **changes)
        finish(start(path, module=module))
        (row,) = metrics(path.parent)
        found.append({key: value for key, value in row.items() if key.startswith("val_")})
    assert found[0]["val_logps/chosen"] < -10
    for key, value in found[0].items():
        assert found[1][key] == pytest.approx(value, rel=1e-5, abs=1e-6), key


def test_figures_of_labelled_answers_are_means_over_their_label(tmp_path, model_folder, pairs):
    """Whatever the share of a label is, in the training data and in dataset_val."""
    rows = [json.loads(line) for line in pairs.read_text().splitlines()[:6]]
    own = [{"prompt": r["prompt"], "completion": r["chosen"], "label": True} for r in rows]
    own += [{"prompt": r["prompt"], "completion": r["rejected"], "label": False} for r in rows]
    found = []
    for name, kept in (("all", own), ("few", own[:6] + own[6:8])):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in kept))
        changes = {"max_steps": 1, "run_val_every_n_steps": 1, "optimizer": NEVER}
        changes |= {"dataset_val": {"data_files": str(path), "split": "train"}}
        train = config(tmp_path / name, model_folder, pairs, UNPAIRED, **changes)
        finish(start(train, module="trainer.train kto"))
        found += metrics(train.parent)
    chosen, rejected = "val_logps/chosen", "val_logps/rejected"
    assert found[0][chosen] == pytest.approx(found[1][chosen], rel=1e-6)
    # Of no answer there is no mean.
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own[:6]))
    finish(
        start(
            config(tmp_path / "none", model_folder, pairs, UNPAIRED, **changes),
            module="trainer.train kto",
        )
    )
    (line,) = metrics(tmp_path / "none")
    assert line[chosen] == pytest.approx(found[0][chosen], rel=1e-6) and line[rejected] is None
