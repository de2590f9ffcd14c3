"""Reward models: pairs scored at their last tokens, and as others load them."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import yaml
from peft import PeftModel
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForSequenceClassification,
)

from runspec.keys.model import TRANSFORMERS
from runspec.keys.reward import RewardConfig
from tests.trainer.methods.pairs import pairs_config, write_pairs
from tests.trainer.runs import finish, lora_model, metrics, start
from trainer.check import faults
from trainer.checkpoint.classifier import pad_token
from trainer.config import parse, read_yaml
from trainer.data import batches
from trainer.methods.reward import RewardModelling, document_scores
from trainer.models import build

MODULE = "trainer.train reward"
FULL = {"_component_": TRANSFORMERS}
LORA = FULL | {"lora_rank": 4, "lora_alpha": 8}
# By name: ranks, changes to the config.
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "lora-fsdp": (2, {"model": LORA, "batch_size": 2}),
    "full-tensor": (2, {"tensor_parallel_dim": 2, "activation_checkpointing": "full"}),
}

# The loss of each of 20 steps of trl.RewardTrainer 1.16 on the pairs of this file, in their order,
# from the model of reward_folder: AdamW, 3e-4, no weight decay, 8 pairs per batch.
TRL = (
    *(0.7568985, 0.3231474, 0.1403605, 0.0786128, 0.0569093),
    *(0.0439442, 0.0350275, 0.0307752, 0.0277459, 0.0250948),
    *(0.0227960, 0.0212240, 0.0196572, 0.0183866, 0.0172627),
    *(0.0162303, 0.0151644, 0.0142559, 0.0134173, 0.0126558),
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    return write_pairs(path, margin=lambda i: 0.5 * (i % 2))


def config(folder: Path, model_folder: Path, pairs: Path, **changes: Any) -> Path:
    standard = {
        "model": FULL,
        "batch_size": 4,
        "center_rewards_coefficient": 0.01,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
    }
    component = "trainer.data.preferences.PreferenceDataset"
    return pairs_config(folder, model_folder, pairs, component, **standard | changes)


@pytest.fixture(scope="module")
def root(tmp_path_factory, model_folder, pairs):
    """The folder in which every run lies by its name."""
    folder = tmp_path_factory.mktemp("reward")
    for name, (ranks, changes) in RUNS.items():
        path = config(folder / name, model_folder, pairs, **changes)
        finish(start(path, ranks, module=MODULE))
    return folder


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory, model_folder):
    """A reward model as transformers saves it."""
    folder = tmp_path_factory.mktemp("rewards") / "model"
    model = AutoModelForSequenceClassification.from_pretrained(
        model_folder, num_labels=1, dtype=torch.float32
    )
    with torch.no_grad():
        model.score.weight.copy_(0.02 * torch.arange(model.config.hidden_size).cos())
    shutil.copytree(model_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(folder)
    return folder


def test_the_curve_is_trls(tmp_path, reward_folder, pairs):
    changes = dict.fromkeys(("dataset_val", "run_val_every_n_steps", "save_every_n_steps"))
    changes |= {"max_steps": len(TRL), "batch_size": 8, "shuffle": False}
    changes["optimizer"] = {"_component_": "torch.optim.AdamW", "lr": 3e-4, "weight_decay": 0.0}
    path = config(tmp_path, reward_folder, pairs, **changes)
    content = yaml.safe_load(path.read_text())
    content["dataset"]["split"] = "train"
    path.write_text(yaml.safe_dump(content))
    finish(start(path, module=MODULE))
    assert [line["loss"] for line in metrics(tmp_path)] == pytest.approx(TRL, abs=1e-5)


def test_it_goes_on_from_a_reward_model_as_a_plain_loop_does(tmp_path, reward_folder, pairs, world):
    """Its score head stays; the curve is that of transformers' own class."""
    reference = AutoModelForSequenceClassification.from_pretrained(reward_folder)
    assert isinstance(reference, LlamaForSequenceClassification)
    changes = {"dataset_val": None, "run_val_every_n_steps": None, "max_steps": 8}
    path = config(tmp_path / "run", reward_folder, pairs, **changes)
    finish(start(path, module=MODULE))

    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    data = batches.build(parse(read_yaml(path), RewardConfig), world, RewardModelling.form)
    steps = list(data.training.from_step(0))
    for (batch,), line in zip(steps, metrics(tmp_path / "run"), strict=True):
        mask = torch.arange(batch.inputs.tokens.shape[1]) < torch.tensor(batch.lengths).unsqueeze(1)
        scores = reference(
            input_ids=batch.inputs.tokens, attention_mask=mask.long()
        ).logits.squeeze(-1)
        chosen, rejected = scores[::2], scores[1::2]
        loss = -F.logsigmoid(chosen - rejected - batch.numbers).mean()
        loss = loss + 0.01 * (chosen + rejected).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert line["loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert line["rewards/accuracies"] == (chosen > rejected).float().mean().item()


def test_packed_scores_equal_padded_ones(tmp_path, reward_folder, pairs, world):
    found: dict[str, dict[int, torch.Tensor]] = {}
    for name, more in (("padded", {"max_steps": 6}), ("packed", {"row_length": 160})):
        path = config(tmp_path / name, reward_folder, pairs, **more)
        settings = parse(read_yaml(path), RewardConfig)
        data = batches.build(settings, world, RewardModelling.form)
        module = build.build(settings, world).module.eval()
        found[name] = {}
        for (batch,) in data.training.from_step(0):
            with torch.no_grad():
                scores = document_scores(module, batch).view(-1, 2)
            found[name] |= dict(zip(batch.samples.tolist(), scores, strict=True))
        assert (batch.inputs.documents is not None) == (name == "packed")
    assert found["padded"].keys() >= found["packed"].keys() and len(found["packed"]) > 8
    for sample, scores in found["packed"].items():
        torch.testing.assert_close(scores, found["padded"][sample], rtol=0, atol=1e-5)


def scores_of(model: torch.nn.Module, folder: Path, pairs: Path) -> dict[str, float]:
    """The mean scores of the answers of dataset_val, as a user of transformers gets them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line) for line in pairs.read_text().splitlines()][24:]
    found = {}
    for name in ("chosen", "rejected"):
        talks = [
            [{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": r[name]}]
            for r in rows
        ]
        batch = tokenizer.apply_chat_template(
            talks, padding=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            found[name] = model(**batch).logits.mean().item()
    return found


@pytest.mark.parametrize("name", RUNS)
def test_the_export_scores_as_the_run_did(name, root, model_folder, pairs):
    export, last = root / name / "export", metrics(root / name)[-1]
    content = json.loads((export / "config.json").read_text())
    assert content["architectures"] == ["LlamaForSequenceClassification"]
    assert content["num_labels"] == 1 and content["pad_token_id"] != content["eos_token_id"]
    model = AutoModelForSequenceClassification.from_pretrained(export)
    found = [scores_of(model.eval(), export, pairs)]
    if name.startswith("lora"):
        base = AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1)
        base.config.pad_token_id = content["pad_token_id"]
        adapted = PeftModel.from_pretrained(base, str(export / "adapter"))
        assert adapted.peft_config["default"].task_type == "SEQ_CLS"
        found.append(scores_of(adapted.eval(), export, pairs))
    for scores in found:
        for answer, score in scores.items():
            assert score == pytest.approx(last[f"val_rewards/{answer}"], abs=1e-5)


def test_it_goes_on_from_an_adapter_with_its_score_head(root, tmp_path, model_folder, pairs):
    own = {
        "checkpoint_dir": str(model_folder),
        "adapter_checkpoint": str(root / "lora-fsdp/export/adapter"),
    }
    changes = {"model": LORA, "checkpointer": own, "max_steps": 2}
    changes["optimizer"] = {"_component_": "torch.optim.AdamW", "lr": 0.0}
    path = config(tmp_path, model_folder, pairs, **changes)
    finish(start(path, module=MODULE))
    before, after = metrics(root / "lora-fsdp")[-1], metrics(tmp_path)[-1]
    assert after["val_loss"] == pytest.approx(before["val_loss"], abs=1e-6)


def test_what_cannot_be_a_reward_model_is_refused(tmp_path, model_folder, pairs):
    path = config(
        tmp_path, model_folder, pairs, model=lora_model(lora_modules=["q_proj", "lm_head"])
    )
    (fault,) = faults(read_yaml(path), RewardModelling)
    assert fault.startswith("model.lora_modules")


class Tokens(NamedTuple):
    """What of a tokenizer the choice of a padding token reads."""

    special_tokens: dict[str, int]
    pad_id: int
    bos_id: int | None
    ends: frozenset[int]


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        # Llama 3's, which pads by its end token; Qwen 3's, whose end token is another.
        (Tokens({"<bos>": 0, "<eot>": 1, "<|right_pad_id|>": 2}, 1, 0, frozenset({1})), 2),
        (Tokens({"<|endoftext|>": 5, "<|im_end|>": 6}, 5, None, frozenset({6})), 5),
        (Tokens({"<s>": 1, "</s>": 2}, 2, 1, frozenset({2})), 1),
        (Tokens({"</s>": 2}, 2, None, frozenset({2})), None),
    ],
)
def test_no_document_ends_by_the_padding_token(tokens, wanted):
    assert pad_token(tokens)[1] == wanted
