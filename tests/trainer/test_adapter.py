"""A run that goes on from an adapter, and the adapters that it refuses."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer.runs import MODEL_SIZES, lora_model, metrics, train, write_config
from trainer.config import load
from trainer.errors import ConfigError
from trainer.layers import lora
from trainer.loop import Trainer
from trainer.objectives.sft import SupervisedFineTuning
from trainer.parallel import world as distributed
from trainer.parallel.sharded import full_tensor
from trainer.storage import adapter, weights


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, dataset: Path) -> Path:
    """The export of a LoRA run of 3 steps."""
    folder = tmp_path_factory.mktemp("first")
    train(write_config(folder, model_folder, dataset, model=lora_model(), max_steps=3))
    return folder / "export"


def config(folder: Path, model_folder: Path, dataset: Path, given: Path, **changes: Any) -> Path:
    return write_config(
        folder,
        model_folder,
        dataset,
        **{
            "model": lora_model(),
            "max_steps": 1,
            "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-9},
            "checkpointer": {
                "checkpoint_dir": str(model_folder),
                "adapter_checkpoint": str(given),
            },
        }
        | changes,
    )


def build(path: Path) -> Trainer:
    return Trainer(load(path), distributed.start("cpu"), 0, SupervisedFineTuning)


def test_every_rank_gets_its_part_and_the_export_is_the_same(
    exported: Path, tmp_path: Path, model_folder: Path, dataset: Path
) -> None:
    """On two ranks, by FSDP; a step of next to no learning rate leaves the adapter as it was."""
    path = config(tmp_path, model_folder, dataset, exported / "adapter", batch_size=4)
    assert "adapter from " in train(path, ranks=2)
    before, after = (
        load_file(folder / "adapter/adapter_model.safetensors")
        for folder in (exported, tmp_path / "export")
    )
    assert before.keys() == after.keys() and any(t.any() for n, t in before.items() if "_B" in n)
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-7)
    assert metrics(tmp_path)[0]["loss"] < metrics(exported.parent)[0]["loss"]


def test_torchtunes_names_and_fused_matrices(
    exported: Path, tmp_path: Path, model_folder: Path, dataset: Path
) -> None:
    """torchtune's file has the parameters' own names; ours of a fused matrix has blocks."""
    try:
        trainer = build(config(tmp_path / "one", model_folder, dataset, exported / "adapter"))
        named = weights.named_parameters(trainer.model.module)
        tensors = {n: p.detach().clone() for n, p in named if lora.is_adapter(n)}
        save_file(tensors, tmp_path / "tune.safetensors")
        for parameter in trainer.model.trainable:
            parameter.detach().zero_()
        path = config(tmp_path / "two", model_folder, dataset, tmp_path / "tune.safetensors")
        adapter.load(trainer.model, load(path))
        for name, parameter in weights.named_parameters(trainer.model.module):
            if name in tensors:
                assert torch.equal(full_tensor(parameter), tensors[name])
    finally:
        distributed.stop()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": lora_model(lora_rank=8)}, "r=4, the model model.lora_rank=8; set"),
        ({"model": lora_model(lora_alpha=32)}, "lora_alpha=8.0, the model model.lora_alpha=32"),
        (
            {"model": lora_model(lora_attn_modules=["q_proj"])},
            r"holds an adapter for layers\.\*\.attn\.v_proj, the model has none",
        ),
        ({"model": {"_component_": "torchtune.models.llama3.llama3", **MODEL_SIZES}}, "no adapter"),
        ({"missing": "q_proj"}, "holds nothing for the model's layers"),
        ({"given": "adapter_0.pt"}, "is no safetensors file; pickled adapters are not read"),
        ({"given": "nowhere"}, "does not exist"),
    ],
    ids=["rank", "alpha", "more", "full", "fewer", "pickle", "nowhere"],
)
def test_an_adapter_of_another_model_is_refused_by_name(
    change: dict[str, Any],
    told: str,
    exported: Path,
    tmp_path: Path,
    model_folder: Path,
    dataset: Path,
) -> None:
    given = tmp_path / "adapter"
    shutil.copytree(exported / "adapter", given)
    (given / "adapter_0.pt").write_bytes(b"")
    changes = dict(change)
    if kind := changes.pop("missing", None):
        file = given / "adapter_model.safetensors"
        save_file({n: t for n, t in load_file(file).items() if kind not in n}, file)
    given /= changes.pop("given", "")
    try:
        with pytest.raises(ConfigError, match=told) as caught:
            build(config(tmp_path / "run", model_folder, dataset, given, **changes))
    finally:
        distributed.stop()
    assert all(x.startswith("checkpointer.adapter_checkpoint: ") for x in caught.value.faults)
    assert json.loads((exported / "adapter/adapter_config.json").read_text())["r"] == 4
