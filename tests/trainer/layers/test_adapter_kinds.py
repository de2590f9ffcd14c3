"""(IA)3, prompt and prefix tuning: against PEFT's own, in every layout, resumed, exported."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import yaml
from transformers import AutoModelForCausalLM

from tests.trainer.runs import Runs, metrics, tensors, train, write_config
from trainer import check
from trainer.checkpoint import weights
from trainer.config import load
from trainer.data import batches
from trainer.methods.sft import SupervisedFineTuning
from trainer.models import build as models

KINDS = {
    "ia3": {"adapter": "ia3"},
    "prompt": {"adapter": "prompt", "num_virtual_tokens": 7},
    "prefix": {"adapter": "prefix", "num_virtual_tokens": 7},
}
TOKENS = torch.arange(40).reshape(2, 20) * 13 % 1024
HALF, PACKED = {"batch_size": 2}, {"row_length": 96, "batch_size": 4}
# By name: ranks, and what changes the run of one process on packed rows.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (2, HALF | {"activation_checkpointing": "op", "compile": True}),
    "hybrid": (4, {"tensor_parallel_dim": 2, "activation_checkpointing": "full", **HALF}),
}


def config(folder: Path, model_folder: Path, dataset: Path, kind: str, **changes: Any) -> Path:
    model = KINDS[kind] | changes.pop("model", {})
    changes = {"save_adapter_weights_only": True} | changes
    return write_config(folder, model_folder, dataset, model=model, **changes)


def peft_model(kind: str, model_folder: Path, **fields: Any) -> peft.PeftModel:
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    settings = {
        "ia3": peft.IA3Config,
        "prompt": peft.PromptTuningConfig,
        "prefix": peft.PrefixTuningConfig,
    }[kind](task_type="CAUSAL_LM", **fields)
    return peft.get_peft_model(base, settings)


@pytest.mark.parametrize("kind", KINDS)
def test_twenty_steps_equal_pefts_module_in_a_plain_loop(
    kind, tmp_path, model_folder, dataset, world
):
    changes = {"max_steps": 20, "clip_grad_norm": None}
    path = config(tmp_path / "own", model_folder, dataset, kind, **changes)
    train(path)

    own = load(path)
    model = models.build(own, world).module
    first, _ = model.adapter.to_peft(model, weights.hub_tensors(model), torch.float32)
    other = peft_model(kind, model_folder, **({} if kind == "ia3" else {"num_virtual_tokens": 7}))
    trained = {n: p for n, p in other.named_parameters() if p.requires_grad}
    with torch.no_grad():
        if kind == "ia3":
            assert {n.replace(".default", "") for n in trained} == set(first)
            assert all((p == 1).all() for p in trained.values())
        else:
            [prompt] = trained.values()
            prompt.copy_(first["prompt_embeddings"])
    optimizer = torch.optim.AdamW(trained.values(), lr=3e-3)
    losses = []
    for [batch] in batches.build(own, world).training.from_step(0):
        logits = other(input_ids=batch.inputs.tokens).logits[:, -batch.inputs.tokens.shape[1] :]
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found = [line["loss"] for line in metrics(tmp_path / "own")]
    assert found == pytest.approx(losses, abs=1e-5) and len(found) == 20
    assert found[-1] < found[0] - 0.05
    export = tensors(tmp_path / "own/export/adapter")
    for name, parameter in trained.items():
        key = name.replace(".default", "") if kind == "ia3" else "prompt_embeddings"
        torch.testing.assert_close(export[key], parameter.detach(), rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, model_folder, dataset):
    def write(folder: Path, **changes: Any) -> Path:
        return config(folder, model_folder, dataset, folder.name.partition("-")[0], **changes)

    layouts = {f"{kind}-{name}": layout for kind in KINDS for name, layout in LAYOUTS.items()}
    return Runs(tmp_path_factory.mktemp("kinds"), write, dict.fromkeys(KINDS, PACKED), layouts)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_layouts_equal_one_process(kind, layout, runs):
    runs.assert_same(f"{kind}-{layout}")


def test_ia3_merges_exactly(tmp_path, model_folder, dataset):
    """Over a base in 4 bits, too: `PeftModel` and the merged folder give the same logits."""
    for name, model in (("plain", {}), ("nf4", {"quantize_base": True})):
        given = {"save_adapter_weights_only": False, "model": model}
        train(config(tmp_path / name, model_folder, dataset, "ia3", **given))
    export = tmp_path / "plain/export"
    with torch.inference_mode():
        merged = AutoModelForCausalLM.from_pretrained(export)(TOKENS).logits
        base = AutoModelForCausalLM.from_pretrained(model_folder)
        found = peft.PeftModel.from_pretrained(base, export / "adapter")(TOKENS).logits
        other = AutoModelForCausalLM.from_pretrained(tmp_path / "nf4/export")(TOKENS).logits
    torch.testing.assert_close(merged, found, rtol=0, atol=1e-5)
    assert 1e-3 < (other - merged).abs().max() < 1
    settings = json.loads((export / "adapter/adapter_config.json").read_text())
    assert settings["target_modules"] == ["down_proj", "k_proj", "v_proj"]
    assert settings["feedforward_modules"] == ["down_proj"]


def faults(path: Path) -> list[str]:
    return check.faults(yaml.safe_load(path.read_text()), SupervisedFineTuning)


def test_check_says_what_is_wrong(tmp_path, model_folder, dataset):
    cases: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "cannot be merged": ("prompt", {}, {"save_adapter_weights_only": False}),
        "no layer up for (IA)3; has down_proj": ("ia3", {"target_modules": ["up"]}, {}),
        "leave no room": ("prefix", {"num_virtual_tokens": 5000}, {}),
    }
    for number, (reason, (kind, model, changes)) in enumerate(cases.items()):
        path = config(tmp_path / str(number), model_folder, dataset, kind, model=model, **changes)
        assert any(reason in fault for fault in faults(path)), (reason, faults(path))
