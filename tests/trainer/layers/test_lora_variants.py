"""rsLoRA, and LoRA on the output head: against PEFT's own."""

import shutil

import peft
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from tests.trainer.runs import lora_model, metrics, tensors, train, write_config
from trainer import optimizers
from trainer.checkpoint import weights
from trainer.config import load
from trainer.data import batches
from trainer.models import build as models

TOKENS = torch.arange(40).reshape(2, 20) * 13 % 1024
FOLDER = {"_component_": "transformers", "lora_rank": 4, "lora_alpha": 8}
# Adam would spread the last bits of B's first gradients.
SGD = {"_component_": "torch.optim.SGD", "lr": 0.03, "momentum": 0.9}
VARIANTS = {"use_rslora": True}
# The head's products are large: with a rate of 0.1 the training diverges.
SLOW = SGD | {"lr": 0.01}
HEAD = {"lora_modules": ["q_proj", "down_proj", "lm_head"]}


@pytest.mark.parametrize(
    "settings",
    [
        VARIANTS,
        pytest.param(HEAD, marks=pytest.mark.long, id="head"),
    ],
)
def test_twenty_steps_equal_pefts(settings, tmp_path, model_folder, dataset, world):
    model, sgd = FOLDER | settings, SLOW if settings is HEAD else SGD
    cosine = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
    changes = {
        "max_steps": 20,
        "clip_grad_norm": None,
        "lr_scheduler": {"_component_": cosine, "num_warmup_steps": 4},
        "optimizer": sgd,
    }
    path = write_config(tmp_path / "own", model_folder, dataset, model=model, **changes)
    train(path)
    own = load(path)
    module = models.build(own, world).module
    first, _ = module.adapter.to_peft(module, weights.hub_tensors(module), torch.float32)

    given = {key: value for key, value in settings.items() if key in VARIANTS}
    targets = settings.get("lora_modules", "all-linear")
    fields = {"r": 4, "lora_alpha": 8, "target_modules": targets, **given}
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    other = peft.get_peft_model(base, peft.LoraConfig(**fields, task_type="CAUSAL_LM"))
    trained = {n: p for n, p in other.named_parameters() if p.requires_grad}
    assert {n.replace(".default", "") for n in trained} == set(first)
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(first[name.replace(".default", "")])
    optimizer = torch.optim.SGD(trained.values(), lr=sgd["lr"], momentum=sgd["momentum"])
    schedule = optimizers.schedule(changes["lr_scheduler"], optimizer, 20)
    losses = []
    for [batch] in batches.build(own, world).training.from_step(0):
        logits = other(input_ids=batch.inputs.tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found = [line["loss"] for line in metrics(tmp_path / "own")]
    assert found == pytest.approx(losses, abs=1e-5) and found[-1] < found[0] - 0.1
    # PEFT reads the export.
    plain = AutoModelForCausalLM.from_pretrained(model_folder)
    with torch.inference_mode():
        read = peft.PeftModel.from_pretrained(plain, tmp_path / "own/export/adapter").eval()
        wanted = other.eval()(TOKENS).logits
        torch.testing.assert_close(read(TOKENS).logits, wanted, rtol=0, atol=1e-4)


@pytest.mark.long
def test_dropout_under_tensor_parallelism_resumes_bit_for_bit(tmp_path, model_folder, dataset):
    """And it only drops out: with a tenth of the inputs less the loss falls nearly as without."""
    given = {"tensor_parallel_dim": 2, "save_every_n_steps": 3, "row_length": 96, "batch_size": 4}
    losses = {}
    for name, rate in (("without", 0.0), ("whole", 0.1), ("again", 0.1)):
        model = lora_model(lora_dropout=rate)
        path = write_config(tmp_path / name, model_folder, dataset, model=model, **given)
        if name == "again":
            kept = tmp_path / "whole/checkpoints/step_3"
            shutil.copytree(kept, tmp_path / "again/checkpoints/step_3")
        train(path, ranks=2, attempt=int(name == "again"))
        losses[name] = [line["loss"] for line in metrics(tmp_path / name)]
    assert losses["again"] == losses["whole"][3:]
    assert losses["whole"] != losses["without"]
    assert losses["whole"] == pytest.approx(losses["without"], abs=0.2)
    one, other = (tensors(tmp_path / name / "export/adapter") for name in ("whole", "again"))
    assert all(one[key].equal(other[key]) for key in one)
