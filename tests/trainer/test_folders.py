"""Odd model folders: the trainer takes each as transformers does, or names the file and a remedy.

Compared are the tokens of rendered conversations, the logits, and the loss of the answers.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.trainer.folders import (
    INDEX,
    SHARDED,
    WHOLE,
    Change,
    all_of,
    consolidated,
    copied,
    edit,
    shards,
    text,
    without,
    write,
)
from trainer import check
from trainer.config import instantiate, parse
from trainer.layers.batch import MicroBatch
from trainer.layers.loss import TokenLoss
from trainer.models import build as models
from trainer.objectives.sft import SupervisedFineTuning
from trainer.parallel.world import World

NODE, MACHINE = (
    {"role": "user", "content": "a node?"},
    {"role": "assistant", "content": "a machine"},
)
TURNS = [NODE, MACHINE, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c d"}]
CONVERSATIONS = [TURNS[:2], [{"role": "system", "content": "short"}, *TURNS]]
# What transformers reads, and so does the trainer.
SAME: dict[str, Change] = {
    "one file": lambda folder: None,
    "shards and an index": SHARDED,
    "shards of another model left over": all_of(shards(3, index=False, other=True), SHARDED),
    "Mistral's own file beside one file": consolidated,
    "Mistral's own file beside shards": all_of(SHARDED, consolidated),
    "an index left over beside one file": shards(2, other=True),
    "another name by config.json": all_of(
        shards(1, index=False, named="mine"),
        shards(1, other=True, index=False),
        edit("config", transformers_weights="mine-00001-of-00001.safetensors"),
    ),
}
# By its name: the change, and what a refusal says.
REFUSED: dict[str, tuple[Change, tuple[str, ...]]] = {
    "a shard is missing": (
        all_of(SHARDED, without("model-00002-of-00002.safetensors")),
        ("model-00002-of-00002.safetensors is missing; download it",),
    ),
    "shards without an index": (
        all_of(SHARDED, without(INDEX)),
        ("holds model-00001-of-00002.safetensors, but neither", INDEX, "download the model"),
    ),
    "Mistral's own file alone": (
        all_of(consolidated, without(WHOLE)),
        ("holds consolidated.safetensors, but neither", "; download the model as"),
    ),
    "pickled weights": (
        all_of(text("pytorch_model.bin", ""), without(WHOLE)),
        ("holds neither model.safetensors nor", "; download the model as"),
    ),
    "an index that is cut short": (
        all_of(SHARDED, text(INDEX, '{"weight_map": {')),
        (f"{INDEX} cannot be read; download it again",),
    ),
    "an adapter's config beside weights": (
        edit("adapter_config", base_model_name_or_path="/base"),
        ("holds an adapter (adapter_config.json); give", "remove that file"),
    ),
}


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("folders") / "base")


def content_of(folder: Path, **changes: Any) -> dict[str, Any]:
    """A train.yaml."""
    return {
        "output_dir": str(folder.parent / "run"),
        "device": "cpu",
        "dtype": "fp32",
        "tokenizer": {
            "_component_": "trainer.data.tokenizers.hugging_face_tokenizer",
            "path": str(folder),
        },
        "checkpointer": {"checkpoint_dir": str(folder)},
        "dataset": {
            "_component_": "trainer.data.conversations.conversation_dataset",
            "source": "json",
            "data_files": "none.jsonl",
        },
        "batch_size": 1,
        "epochs": 1,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
    } | changes


@pytest.mark.parametrize("name", SAME)
def test_a_folder_means_what_transformers_makes_of_it(
    name: str, base: Path, tmp_path: Path, world: World
) -> None:
    folder = copied(base, tmp_path / "model", SAME[name])
    content = content_of(folder)
    assert check.faults(content, SupervisedFineTuning) == []
    config = parse(content)
    tokenizer = instantiate("tokenizer", config.tokenizer)
    theirs = AutoTokenizer.from_pretrained(folder)
    model = models.build(config, world).module
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loss = TokenLoss(config)
    for turns in CONVERSATIONS:
        answers = [n for n, turn in enumerate(turns) if turn["role"] == "assistant"]
        tokens, mask = tokenizer.tokenize_turns(turns, answers)
        assert tokens == theirs.apply_chat_template(turns, tokenize=True, return_dict=False)
        row = torch.tensor([tokens])
        with torch.inference_mode():
            logits = reference(row).logits
            torch.testing.assert_close(model(row), logits, rtol=0, atol=1e-5)
        labels = torch.tensor([[-100 if m else t for t, m in zip(tokens, mask, strict=True)]])
        wanted = F.cross_entropy(logits[0, :-1], labels[0, 1:])
        assert loss_of(loss, model, row, labels) == pytest.approx(wanted.item(), abs=1e-5)


def loss_of(loss: Callable[..., torch.Tensor], model: Any, row: Any, labels: Any) -> float:
    """The mean over the trained tokens, as the trainer computes it."""
    shifted = torch.cat([labels[:, 1:], torch.full((1, 1), -100)], 1)
    trained = (shifted.flatten() != -100).nonzero().flatten()
    counts = row.numel(), len(trained)
    owners, one = torch.zeros_like(trained), torch.arange(1)
    batch = MicroBatch(row, shifted, trained, *counts, (1,), owners, one, torch.zeros(1))
    with torch.no_grad():
        return loss(model, batch, torch.device("cpu")).item() / len(trained)


@pytest.mark.parametrize("name", REFUSED)
def test_what_transformers_makes_something_else_of_is_refused(
    name: str, base: Path, tmp_path: Path
) -> None:
    change, told = REFUSED[name]
    folder = copied(base, tmp_path / "model", change)
    faults = check.faults(content_of(folder), SupervisedFineTuning)
    assert any(all(part in fault for part in told) for fault in faults), faults
