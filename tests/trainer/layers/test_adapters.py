"""A kind of adapter in one file goes through everything that the kit has, and no file knows it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner

from launcher.cli import cookbook
from runspec import adapters
from tests.trainer.forks import Ranks
from tests.trainer.runs import (
    LINEAR,
    finish,
    lora_model,
    metrics,
    randomise_adapter,
    tensors,
    train,
    write_config,
)
from trainer import check
from trainer.config import load
from trainer.layers.adapters.base import disabled
from trainer.methods.sft import SupervisedFineTuning
from trainer.model import Inputs
from trainer.models import build as models
from trainer.parallel import world as distributed
from trainer.sharded import full_tensor

MODULE = "tests.trainer.layers.toy_adapter"
KIND = f"{MODULE}.BlockGain"
# One that a folder's config.json names, so that the adapter is the trainer's to add.
TOY = {
    "model": {"_component_": "transformers", "adapter": KIND, "gain_init": 0.9},
    "save_adapter_weights_only": True,
    "save_every_n_steps": 3,
}
TOKENS = torch.arange(48).reshape(2, 24) * 13 % 1024


@pytest.fixture(autouse=True)
def allowed(monkeypatch):
    monkeypatch.setenv("COOKBOOK_COMPONENTS", MODULE)


def config(folder: Path, model_folder: Path, dataset: Path, **changes: Any) -> Path:
    return write_config(folder, model_folder, dataset, **TOY | changes)


def test_its_file_is_loaded_again(tmp_path, model_folder, dataset):
    train(config(tmp_path / "first", model_folder, dataset))
    export = tmp_path / "first/export"
    assert not tensors(export), "there is nothing to merge"
    settings = json.loads((export / "adapter/adapter_config.json").read_text())
    assert settings["peft_type"] == "BLOCKGAIN" and settings["gain_init"] == 0.9
    found = tensors(export / "adapter")
    assert set(found) == {f"base_model.model.model.layers.{n}.block_gain" for n in range(3)}
    assert all((scale != 0.9).any() for scale in found.values())

    folder = {"checkpoint_dir": str(model_folder), "adapter_checkpoint": str(export / "adapter")}
    changes = {"batch_size": 4, "optimizer": {"_component_": "torch.optim.SGD", "lr": 1e-12}}
    path = config(tmp_path / "second", model_folder, dataset, checkpointer=folder, **changes)
    assert "adapter from " in train(path, ranks=2)
    assert metrics(tmp_path / "second")[0]["loss"] < metrics(tmp_path / "first")[0]["loss"]
    for name, scale in tensors(tmp_path / "second/export/adapter").items():
        torch.testing.assert_close(scale, found[name], rtol=0, atol=1e-7)
    other = TOY["model"] | {"gain_init": 0.5}
    wrong = config(tmp_path / "wrong", model_folder, dataset, checkpointer=folder, model=other)
    assert any("has gain_init=0.9, the model model.gain_init=0.5" in f for f in faults(wrong))


def faults(path: Path) -> list[str]:
    return check.faults(yaml.safe_load(path.read_text()), SupervisedFineTuning)


def test_trainer_check_takes_it_and_says_what_is_wrong(
    tmp_path, model_folder, dataset, monkeypatch
):
    assert faults(config(tmp_path / "right", model_folder, dataset)) == []
    path = config(tmp_path / "merged", model_folder, dataset, save_adapter_weights_only=False)
    assert any("BlockGain cannot be merged into the base weights" in f for f in faults(path))
    for name, reason in (
        ("tests.trainer.layers.toy_adapter.Other", "there is no"),
        ("lorra", "allowed"),
    ):
        model = {"_component_": "transformers", "adapter": name}
        path = config(tmp_path / "unknown", model_folder, dataset, model=model)
        assert any(f.startswith("model.adapter:") and reason in f for f in faults(path)), name
    both = lora_model(adapter=KIND)
    path = config(tmp_path / "both", model_folder, dataset, model=both)
    assert any("model.lora_alpha: is an argument of no model" in f for f in faults(path))
    monkeypatch.delenv("COOKBOOK_COMPONENTS")
    assert any("COOKBOOK_COMPONENTS" in f for f in faults(config(tmp_path, model_folder, dataset)))


def test_estimate_counts_its_parameters(tmp_path, model_folder, dataset, monkeypatch):
    content = yaml.safe_load(config(tmp_path / "own", model_folder, dataset).read_text())
    del content["output_dir"]
    content["tokenizer"]["max_seq_len"] = 64
    content |= {"entry": "sft", "dtype": "bf16", "resources": {"nodes": 1, "gpus_per_node": 2}}
    recipe = tmp_path / "toy.yaml"
    recipe.write_text(yaml.safe_dump(content))
    found = CliRunner().invoke(cookbook, ["estimate", str(recipe), "--gpu", "h100-80", "--json"])
    assert found.exit_code == 0, found.output + repr(found.exception)
    assert json.loads(found.output)["trainable"] == 3 * 128
    with pytest.raises(ValueError, match="there is no nowhere"):
        adapters.declared("nowhere.at_all.Kind")


PLAIN: dict[str, Any] = {}
OFF = {
    "toy": (TOY["model"], {"_component_": "transformers"}, {"compile": True}),
    "lora": (lora_model(), PLAIN, {"compile": True}),
    "ia3": (PLAIN | {"adapter": "ia3"}, PLAIN, {"compile": True}),
    "prompt": (PLAIN | {"adapter": "prompt"}, PLAIN, {"compile": True}),
    "prefix-tp": (PLAIN | {"adapter": "prefix"}, PLAIN, {"tensor_parallel_dim": 2}),
    "dora-fsdp": (lora_model(adapter="dora", lora_modules=[*LINEAR, "lm_head"]), PLAIN, {}),
}


@pytest.mark.parametrize("case", OFF)
def test_switched_off_it_is_the_base_model_bit_for_bit(case, tmp_path, model_folder, dataset):
    model, plain, changes = OFF[case]
    paths = [
        config(tmp_path / str(n), model_folder, dataset, model=each, **changes)
        for n, each in enumerate((model, plain))
    ]
    variables = {"COOKBOOK_COMPONENTS": MODULE, "TORCH_COMPILE_BACKEND": "aot_eager"}
    ranks = Ranks(__name__, [str(p) for p in paths], 1 + ("-" in case), **variables)
    assert "the same" in finish(ranks)


def main(arguments: list[str]) -> int:
    """Compare a model with its adapter switched off with its base, on one rank of several."""
    configs = [load(Path(path)) for path in arguments]
    world = distributed.start("cpu", vars(configs[0]))
    try:
        adapted, base = (models.build(each, world).module.eval() for each in configs)
        randomise_adapter(adapted)
        with torch.no_grad():
            wanted, before = logits(base), logits(adapted)
            with disabled(adapted):
                off = logits(adapted)
            assert torch.equal(off, wanted) and torch.equal(logits(adapted), before)
            assert not torch.equal(before, wanted)
        world.say("the same")
    finally:
        distributed.stop()
    return 0


def logits(model: torch.nn.Module) -> torch.Tensor:
    return full_tensor(model(Inputs(TOKENS))).clone()
