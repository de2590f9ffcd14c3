"""A run that goes on from an adapter, and the adapters that it refuses."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer.runs import lora_model, metrics, train, write_config
from trainer import check
from trainer.checkpoint import adapter, weights
from trainer.checkpoint.export import export
from trainer.config import load, read_yaml
from trainer.errors import ConfigError
from trainer.loop import Trainer
from trainer.methods.sft import SupervisedFineTuning
from trainer.model import Inputs
from trainer.parallel.world import World
from trainer.sharded import full_tensor

TOKENS = torch.arange(40).reshape(2, 20) * 13 % 1024


@pytest.fixture(scope="module")
def exported(tmp_path_factory, model_folder, dataset):
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


def build(path: Path, world: World) -> Trainer:
    return Trainer(load(path), world, 0, SupervisedFineTuning)


def test_every_rank_gets_its_part_and_the_export_is_the_same(
    exported, tmp_path, model_folder, dataset
):
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


def test_a_file_with_the_parameters_own_names_is_read(
    exported, tmp_path, model_folder, dataset, world
):
    trainer = build(config(tmp_path / "one", model_folder, dataset, exported / "adapter"), world)
    module = trainer.model.module
    named = weights.named_parameters(module)
    tensors = {n: p.detach().clone() for n, p in named if module.is_adapter(n)}
    save_file(tensors, tmp_path / "tune.safetensors")
    for parameter in trainer.model.trainable:
        parameter.detach().zero_()
    path = config(tmp_path / "two", model_folder, dataset, tmp_path / "tune.safetensors")
    adapter.load(trainer.model, load(path))
    for name, parameter in weights.named_parameters(trainer.model.module):
        if name in tensors:
            assert torch.equal(full_tensor(parameter), tensors[name])


def of_peft(folder: Path, model_folder: Path, **settings: Any) -> tuple[Path, torch.Tensor]:
    """An adapter that PEFT made of the demo model, and its logits for TOKENS."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    kinds = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    given = {"r": 4, "lora_alpha": 8, "target_modules": kinds} | settings
    torch.manual_seed(5)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model_folder), LoraConfig(**given)
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
        found = model(TOKENS).logits
    model.save_pretrained(folder)
    return folder, found


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {"use_rslora": True, "use_dora": True},
    ],
    ids=["rslora", "rslora-dora"],
)
def test_pefts_scale_is_kept_and_exported(settings, tmp_path, model_folder, dataset, world):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    given, expected = of_peft(tmp_path / "peft", model_folder, **settings)
    use_dora = settings.get("use_dora", False)
    model = {"lora_rank": 4, "lora_alpha": 8, "adapter": "dora" if use_dora else "lora"}
    path = config(tmp_path / "run", model_folder, dataset, given, model=model)
    (fault,) = check.faults(read_yaml(path), SupervisedFineTuning)
    assert "set model.use_rslora=True" in fault
    model |= {"use_rslora": True}
    path = config(tmp_path / "run", model_folder, dataset, given, model=model)
    assert check.faults(read_yaml(path), SupervisedFineTuning) == []
    trainer = build(path, world)
    module = trainer.model.module.eval()
    with torch.no_grad():
        torch.testing.assert_close(module(Inputs(TOKENS)), expected, rtol=0, atol=2e-5)
    export(trainer.model, trainer.config, trainer.world)
    folder = tmp_path / "run/export"
    written = json.loads((folder / "adapter/adapter_config.json").read_text())
    assert written["use_rslora"] is settings.get("use_rslora", False)
    assert written["lora_alpha"] == 8.0
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(folder)(TOKENS).logits
        base = AutoModelForCausalLM.from_pretrained(model_folder)
        adapted = PeftModel.from_pretrained(base, folder / "adapter").eval()(TOKENS).logits
    torch.testing.assert_close(merged, expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(adapted, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"lora_bias": True}, "the adapter has lora_bias=True, which is not supported; merge it"),
        ({"rank_pattern": {"q_proj": 2}}, r"alpha_pattern scale .*\*.*q_proj otherwise"),
        ({"alpha_pattern": {"layers.1.self_attn.q_proj": 40}}, r"alpha_pattern scale .*q_proj"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\], which is not"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa', which is not supported"),
    ],
    ids=["bias", "rank-pattern", "alpha-pattern", "saved", "pissa"],
)
def test_what_changes_pefts_function_is_refused_by_name(
    settings, told, tmp_path, model_folder, dataset
):
    given, _ = of_peft(tmp_path / "peft", model_folder, **settings)
    file = given / "adapter_config.json"
    # A later PEFT may have fields that are not known yet.
    content = json.loads(file.read_text()) | {"use_other": {"a": 1}, "not_used": None}
    file.write_text(json.dumps(content))
    path = config(tmp_path / "run", model_folder, dataset, given)
    refused = "\n".join(check.faults(read_yaml(path), SupervisedFineTuning))
    assert re.search(told, refused)
    assert "use_other={'a': 1}, which is not supported" in refused and "not_used" not in refused
    file.write_text(json.dumps({k: v for k, v in content.items() if k != "use_other"}))
    assert re.search(told, "\n".join(check.faults(read_yaml(path), SupervisedFineTuning)))
    file.unlink()
    assert "has no adapter_config.json" in check.faults(read_yaml(path), SupervisedFineTuning)[0]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": lora_model(lora_rank=8)}, "r=4, the model model.lora_rank=8; set"),
        ({"model": lora_model(lora_alpha=32)}, "lora_alpha=8.0, the model model.lora_alpha=32"),
        (
            {"model": lora_model(lora_modules=["q_proj"])},
            r"contains an adapter for model\.layers\.\*\.self_attn\.v_proj, the model has none",
        ),
        ({"model": {}}, "no adapter"),
        ({"missing": "q_proj"}, "has nothing for the model's model.layers"),
        ({"given": "adapter_0.pt"}, "is no safetensors file; pickled adapters are not read"),
        ({"given": "nowhere"}, "does not exist"),
    ],
    ids=["rank", "alpha", "more", "full", "fewer", "pickle", "nowhere"],
)
def test_an_adapter_of_another_model_is_refused_by_name(
    change, told, exported, tmp_path, model_folder, dataset, world
):
    given = tmp_path / "adapter"
    shutil.copytree(exported / "adapter", given)
    (given / "adapter_0.pt").write_bytes(b"")
    changes = dict(change)
    if kind := changes.pop("missing", None):
        file = given / "adapter_model.safetensors"
        save_file({n: t for n, t in load_file(file).items() if kind not in n}, file)
    given /= changes.pop("given", "")
    with pytest.raises(ConfigError, match=told) as caught:
        build(config(tmp_path / "run", model_folder, dataset, given, **changes), world)
    assert all(x.startswith("checkpointer.adapter_checkpoint: ") for x in caught.value.faults)
    assert json.loads((exported / "adapter/adapter_config.json").read_text())["r"] == 4
