"""fp8: near bf16, in every layout, with plain weights in what it leaves behind."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from tests.trainer.runs import (
    Runs,
    described,
    empty_model,
    lora_model,
    metrics,
    spec_of,
    train,
    write_config,
)
from trainer.config import load
from trainer.errors import ConfigError
from trainer.layers import linear
from trainer.loop import Trainer
from trainer.methods.sft import SupervisedFineTuning
from trainer.models.build import layout_faults

FP8 = {"dtype": "bf16", "enable_fp8_training": True, "row_length": 96, "batch_size": 4}
FP8 |= {"optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3}}
ROWWISE = FP8 | {"fp8_recipe_name": "rowwise"}
BF16 = FP8 | {"enable_fp8_training": False}
# Of losses that fall from 7 to 4.7 in six steps. Seen: 0.027.
LOSS_TOLERANCE = 0.04


def test_a_layer_that_is_too_narrow_multiplies_as_without_fp8():
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"gate": torch.nn.Linear(64, 1), "up": torch.nn.Linear(64, 32)})
    x = torch.randn(16, 64)
    plain = {name: layer(x) for name, layer in model.items()}
    linear.use_fp8(model, ["gate", "up"], "tensorwise")
    assert torch.equal(model["gate"](x), plain["gate"])
    assert not torch.equal(model["up"](x), plain["up"])


def test_full_training_follows_bf16_and_leaves_plain_weights(
    tmp_path, model_folder, dataset, world
):
    for name, changes in (("bf16", BF16), ("fp8", FP8)):
        config = load(write_config(tmp_path / name, model_folder, dataset, **changes))
        trainer = Trainer(config, world, 0, SupervisedFineTuning)
        assert trainer.train()
        model = trainer.model.module
        layers = [model.get_submodule(name) for name in model.linear_layers()]
        assert all(hasattr(layer, "fp8_settings") == (name == "fp8") for layer in layers)
        assert len(layers) == 3 * 7 and not hasattr(model.output_head, "fp8_settings")
    near(tmp_path / "fp8", tmp_path / "bf16")
    state = [
        FileSystemReader(tmp_path / n / "checkpoints/step_6").read_metadata()
        for n in ("bf16", "fp8")
    ]
    plain, own = (
        {
            key: (entry.size, entry.properties.dtype)
            for key, entry in s.state_dict_metadata.items()
            if hasattr(entry, "size")
        }
        for s in state
    )
    assert own == plain and len(plain) > 60


def near(own: Path, wanted: Path, tolerance: float = LOSS_TOLERANCE) -> None:
    """Two runs' losses are alike, but not the same, and fall."""
    losses, others = ([line["loss"] for line in metrics(folder)] for folder in (own, wanted))
    assert losses == pytest.approx(others, abs=tolerance) and losses != others
    assert losses[-1] < losses[0] - 0.05


def test_what_it_does_not_go_with_is_said_at_once(tmp_path, model_folder, dataset):
    changes = FP8 | {"dtype": "fp32", "fp8_recipe_name": "blockwise"}
    path = write_config(tmp_path, model_folder, dataset, model=lora_model(), **changes)
    with pytest.raises(ConfigError) as raised:
        load(path)
    assert [fault.partition(";")[0] for fault in raised.value.faults] == [
        "fp8_recipe_name must be one of tensorwise, rowwise, got 'blockwise' "
        "(did you mean rowwise?)",
        "enable_fp8_training: needs bf16 weights",
        "enable_fp8_training: is for full fine-tuning, and an adapter's base is frozen",
    ]


def test_sizes_that_no_gpu_multiplies_are_named(tmp_path):
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16}
    folder = described(tmp_path, intermediate_size=344, **heads)
    model = empty_model(folder, **lora_model())
    spec = spec_of(lora_model(), enable_fp8_training=True)
    (found,) = layout_faults(model, spec)
    assert "multiples of 16, and this model has layers of 344;" in found
    faults = layout_faults(model, replace(spec, tensor_parallel_dim=16))
    found = [fault for fault in faults if fault.startswith("enable_fp8_training")]
    assert [fault.partition("layers of ")[2].partition(";")[0] for fault in found] == [
        "128 split over 16 ranks",
        "344 split over 16 ranks",
    ]


TP = {"tensor_parallel_dim": 2}
COMPILED = {"compile": True, "activation_checkpointing": "op"}
BASES: dict[str, dict[str, Any]] = {"packed": BF16, "padded": BF16 | {"row_length": None}}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "packed-rowwise": (1, ROWWISE | {"activation_checkpointing": "full"}),
    "packed-compiled": (1, FP8 | COMPILED),
    "packed-fsdp2-masters": (2, FP8 | {"batch_size": 2, "master_weights": "fp32"}),
    "packed-tp2": (2, ROWWISE | TP),
    "padded-tp2": (2, FP8 | TP | {"row_length": None}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, model_folder, dataset):
    def config(folder: Path, **changes: Any) -> Path:
        return write_config(folder, model_folder, dataset, **changes)

    return Runs(tmp_path_factory.mktemp("fp8"), config, BASES, LAYOUTS)


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_near_bf16(name, runs):
    own, reference = runs[name], runs[runs.base(name)]
    near(own, reference)
    found, wanted = (load_file(run / "export/model.safetensors") for run in (own, reference))
    assert {k: (t.shape, t.dtype) for k, t in found.items()} == {
        k: (t.shape, t.dtype) for k, t in wanted.items()
    }
    recipe = LAYOUTS[name][1].get("fp8_recipe_name", "tensorwise")
    assert f"products in fp8 ({recipe})" in runs.said[name]


@pytest.mark.long
def test_a_run_in_fp8_resumes_in_fp8_only(runs, tmp_path):
    whole, run = runs["packed-fsdp2-masters"], tmp_path / "run"
    shutil.copytree(whole / "checkpoints", run / "checkpoints")
    text = (whole / "train.yaml").read_text().replace(str(whole), str(run))
    path = run / "train.yaml"
    path.write_text(text.replace("enable_fp8_training: true", ""))
    said = train(path, ranks=2, attempt=1, status=None)
    assert "step_6 was made with 'tensorwise', the config gives None" in said
