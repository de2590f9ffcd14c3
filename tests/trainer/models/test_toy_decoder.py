"""A decoder of the user's own (toy_decoder.py) trains like any other; the kit does not change."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.models.toy_decoder import SIZES, write_folder
from tests.trainer.runs import (
    assert_same_curve,
    assert_same_tensors,
    metrics,
    train,
    write_config,
)
from trainer.config import load
from trainer.errors import ConfigError
from trainer.models.build import empty_module

MODULE = "tests.trainer.models.toy_decoder"
TOY = {"_component_": f"{MODULE}.ToyDecoder", **SIZES}
LORA = TOY | {"lora_rank": 4, "lora_alpha": 8}
TP = {"tensor_parallel_dim": 2}
PACKED = {"row_length": 96, "batch_size": 4}
# Runs by name: ranks, the run that it must equal, changes to the config.
RUNS: dict[str, tuple[int, str | None, dict[str, Any]]] = {
    "full": (1, None, {}),
    "lora": (1, None, PACKED | {"model": LORA}),
    "qdora": (1, None, {"model": LORA | {"adapter": "dora", "quantize_base": True}}),
    "unchanged": (
        1,
        None,
        {"max_steps": 1, "optimizer": {"_component_": "torch.optim.SGD", "lr": 0.0}},
    ),
    "full-fsdp2": (2, "full", {"batch_size": 4, "compile": True}),
    "full-tp2": (2, "full", TP | {"activation_checkpointing": "op"}),
    "lora-tp2": (
        2,
        "lora",
        PACKED
        | TP
        | {"model": LORA, "activation_checkpointing": "full"}
        | {"save_every_n_steps": 2},
    ),
}
PAIRS = [(name, reference) for name, (_, reference, _) in RUNS.items() if reference]


@pytest.fixture(scope="module", autouse=True)
def allowed():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COOKBOOK_COMPONENTS", MODULE)
        # Not the usual compiler, whose code for CPUs takes long.
        patch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")
        yield


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory, model_folder):
    return write_folder(tmp_path_factory.mktemp("model") / "toy", model_folder)


def toy_config(folder: Path, toy_folder: Path, dataset: Path, **changes: Any) -> Path:
    checkpointer = {"checkpoint_dir": str(toy_folder)}
    return write_config(
        folder, toy_folder, dataset, **{"model": TOY, "checkpointer": checkpointer} | changes
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory, toy_folder, dataset):
    """The folder in which every run lies by its name."""
    folder = tmp_path_factory.mktemp("toy")
    starts: dict[int, list[Path]] = {}
    for name, (ranks, _, changes) in RUNS.items():
        path = toy_config(folder / name, toy_folder, dataset, **changes)
        starts.setdefault(ranks, []).append(path)
    for ranks, paths in starts.items():
        train(*paths, ranks=ranks, limit_s=600)
    return folder


@pytest.mark.long
@pytest.mark.parametrize(("name", "reference"), PAIRS, ids=[name for name, _ in PAIRS])
def test_every_layout_equals_the_single_process(name, reference, root):
    own, wanted = root / name, root / reference
    assert len(metrics(own)) == 6
    assert_same_curve(own, wanted, 2e-5, 5e-5)
    assert metrics(own)[-1]["loss"] < metrics(own)[0]["loss"] - 0.1, "the loss must fall"
    assert_same_tensors(own, wanted, 2e-4)


@pytest.mark.long
def test_weights_come_back_by_the_hubs_names(root, toy_folder):
    """Bit for bit if nothing is trained; and the adapter's, in the order of their rows."""
    before = load_file(toy_folder / "model.safetensors")
    after = load_file(root / "unchanged/export/model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())

    merged = load_file(root / "lora/export/model.safetensors")
    adapter = load_file(root / "lora/export/adapter/adapter_model.safetensors")
    for name in ("toy.blocks.0.query", "toy.blocks.1.key_value", "toy.blocks.1.mix"):
        a, b = (adapter[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        found = before[f"{name}.weight"] + 2 * b @ a
        torch.testing.assert_close(merged[f"{name}.weight"], found, rtol=0, atol=1e-6)
        assert b.abs().max() > 0
    assert metrics(root / "qdora")[-1]["loss"] < metrics(root / "qdora")[0]["loss"]


def test_what_does_not_fit_is_refused(tmp_path, toy_folder, dataset, monkeypatch):
    told = "no layer qeury; has back, down, key, mix, output_head, query"
    with pytest.raises(ConfigError, match=told):
        empty_module(LORA | {"lora_modules": ["qeury", "key"]})
    with pytest.raises(ConfigError, match=r"model.lora_alpha: needs model.lora_rank"):
        empty_module(TOY | {"lora_alpha": 8})
    with pytest.raises(ConfigError, match=r"returns a RMSNorm, not a trainer\.model\."):
        empty_module({"_component_": "torch.nn.RMSNorm", "normalized_shape": 8})
    path = toy_config(tmp_path, toy_folder, dataset)
    monkeypatch.delenv("COOKBOOK_COMPONENTS")
    with pytest.raises(ConfigError, match=r"ToyDecoder' is not allowed; .*COOKBOOK_COMPONENTS"):
        load(path)
