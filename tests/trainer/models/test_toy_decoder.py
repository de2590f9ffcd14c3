"""A decoder of the user's own (toy_decoder.py) trains like any other; the kit does not change."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.models.toy_decoder import SIZES, write_folder
from tests.trainer.runs import Runs, write_config
from trainer.config import load
from trainer.errors import ConfigError
from trainer.models.build import empty_module

MODULE = "tests.trainer.models.toy_decoder"
TOY = {"_component_": f"{MODULE}.ToyDecoder", **SIZES}
LORA = TOY | {"lora_rank": 4, "lora_alpha": 8}
TP = {"tensor_parallel_dim": 2}
PACKED = {"row_length": 96, "batch_size": 4}
BASES: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": PACKED | {"model": LORA},
    "unchanged": {"max_steps": 1, "optimizer": {"_component_": "torch.optim.SGD", "lr": 0.0}},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "full-fsdp2": (2, {"batch_size": 4, "compile": True}),
    "full-tp2": (2, TP | {"activation_checkpointing": "op"}),
    "lora-tp2": (2, TP | {"activation_checkpointing": "full"}),
}


@pytest.fixture(scope="module", autouse=True)
def allowed():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COOKBOOK_COMPONENTS", MODULE)
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
def runs(tmp_path_factory, toy_folder, dataset):
    def config(folder: Path, **changes: Any) -> Path:
        return toy_config(folder, toy_folder, dataset, **changes)

    return Runs(tmp_path_factory.mktemp("toy"), config, BASES, LAYOUTS)


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_equals_the_single_process(name, runs):
    runs.assert_same(name)


@pytest.mark.long
def test_weights_come_back_by_the_hubs_names(runs, toy_folder):
    """Bit for bit if nothing is trained; and the adapter's, in the order of their rows."""
    before = load_file(toy_folder / "model.safetensors")
    after = load_file(runs["unchanged"] / "export/model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())

    merged = load_file(runs["lora"] / "export/model.safetensors")
    adapter = load_file(runs["lora"] / "export/adapter/adapter_model.safetensors")
    for name in ("toy.blocks.0.query", "toy.blocks.1.key_value", "toy.blocks.1.mix"):
        a, b = (adapter[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        found = before[f"{name}.weight"] + 2 * b @ a
        torch.testing.assert_close(merged[f"{name}.weight"], found, rtol=0, atol=1e-6)
        assert b.abs().max() > 0


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
