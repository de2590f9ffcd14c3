"""20 steps of distillation are those of a plain loop over two models of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import preference
from tests.trainer.layers.test_divergence import plain
from tests.trainer.models.transformers_cases import write
from tests.trainer.runs import finish, metrics, start, write_config
from trainer.config import parse, read_yaml
from trainer.data import batches
from trainer.data.form import SINGLE
from trainer.layers.divergence import Divergence
from trainer.methods.distill import DistillConfig
from trainer.parallel import world as distributed

STEPS = 20


def loop(path: Path, teacher: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step: both models' whole logits, the formula, AdamW."""
    config = parse(read_yaml(path), DistillConfig)
    models = [AutoModelForCausalLM.from_pretrained(f) for f in (config.model_folder, teacher)]
    student, other = models
    common = min(model.config.vocab_size for model in models)
    how = Divergence(config.beta, config.temperature, config.cross_entropy_share)
    optimizer = torch.optim.AdamW(student.parameters(), lr=config.optimizer["lr"])
    world, found = distributed.start("cpu"), []
    try:
        data = batches.build(config, world, SINGLE).training
        for (batch,), _ in zip(data.from_step(0), range(STEPS), strict=False):
            targets = batch.labels.flatten()[batch.trained]
            with torch.no_grad():
                wanted = other(batch.inputs.tokens).logits.flatten(0, 1)[batch.trained, :common]
            own = student(batch.inputs.tokens).logits.flatten(0, 1)[batch.trained, :common]
            loss = plain(own, wanted, targets, how) / len(targets)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(student.parameters(), config.clip_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            found.append((loss.item(), norm.item()))
    finally:
        distributed.stop()
    return found


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_its_curve_is_that_of_a_plain_loop(beta, tmp_path, model_folder, dataset):
    vocabulary = AutoConfig.from_pretrained(model_folder).vocab_size
    wide = {"hidden_size": 96, "num_hidden_layers": 3, "vocab_size": vocabulary + 32}
    teacher = write("qwen3", tmp_path / "teacher", model_folder, **wide, initializer_range=0.2)
    changes: dict[str, Any] = {
        "model": {"_component_": "transformers"},
        "checkpointer": {"checkpoint_dir": str(model_folder)},
        "teacher": str(teacher),
        "beta": beta,
        "temperature": 1.5,
        "max_steps": STEPS,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
    }
    path = write_config(tmp_path / "run", model_folder, dataset, **changes)
    finish(start(path, module="trainer.train distill"))
    wanted, lines = loop(path, teacher), metrics(path.parent)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.05
    assert [line["loss"] for line in lines] == pytest.approx([x for x, _ in wanted], abs=1e-5)
    parts = [(line["kd_loss"] + line["cross_entropy"]) / 2 for line in lines]
    assert parts == pytest.approx([line["loss"] for line in lines])
    assert all(0 <= line["top1_agreement"] <= 1 for line in lines)
    norms = [line["grad_norm"] for line in lines]
    assert norms == pytest.approx([norm for _, norm in wanted], rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gkd", "gkd_own"])
def test_its_curve_is_that_of_trls_gkd(name, tmp_path):
    """On the data, and on answers that are so cold that no draw matters."""
    student, teacher = preference.make_chat_models(tmp_path / "chat")
    data = preference.write_chats(tmp_path / "chats.jsonl")
    own = name == "gkd_own"
    path = preference.our_distillation(tmp_path / "run", student, teacher, data, own)
    method = "plugins.rl.recipe_keys:OnPolicyConfig" if own else "distill"
    finish(start(path, module=f"trainer.train {method}"))
    losses = [line["loss"] for line in metrics(path.parent)]
    wanted = json.loads(preference.CURVES.read_text())["losses"][name]
    assert losses == pytest.approx(wanted, rel=1e-5, abs=1e-5)
