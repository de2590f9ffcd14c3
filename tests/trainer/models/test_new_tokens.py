"""Tokens that a recipe adds: rows of embedding and head, their training, the exports."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from runspec.tokens import grown, new_tokens
from tests.trainer.models.transformers_cases import write
from tests.trainer.runs import assert_same_curve, assert_same_tensors, tensors, train, write_config
from trainer.config import load
from trainer.data.tokenizers import hugging_face_tokenizer
from trainer.errors import ConfigError
from trainer.models import build as models

NEW = ["<ask>", "<very>", "<unused>"]
UNTIED, TIED = "llama3", "llama3-tied"
LORA = {"lora_rank": 4, "lora_alpha": 8}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, model_folder):
    """A model with a head of its own, and a tied one, with the rows that the tokenizer needs."""
    root, rows = tmp_path_factory.mktemp("models"), len(AutoTokenizer.from_pretrained(model_folder))
    return {
        name: write(name, root / name, model_folder, vocab_size=rows) for name in (UNTIED, TIED)
    }


@pytest.fixture(scope="module")
def tagged(tmp_path_factory, dataset):
    """The dataset with two of the new tokens in it."""
    path = tmp_path_factory.mktemp("tagged") / "qa.jsonl"
    path.write_text(dataset.read_text().replace("What is", "<ask>").replace("very ", "<very>"))
    return path


def config_of(folder: Path, source: Path, data: Path, **changes: Any) -> Path:
    tokenizer = {
        "_component_": "trainer.data.tokenizers.hugging_face_tokenizer",
        "path": str(source),
        "new_tokens": NEW,
        "max_seq_len": 64,
    }
    standard = {
        "model": None,
        "checkpointer": {"checkpoint_dir": str(source)},
        "tokenizer": tokenizer,
        "max_steps": 4,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 3e-3},
        "data_cache_dir": str(folder.parent / "tokens"),
    }
    return write_config(folder, source, data, **standard | changes)


def saved(name: str) -> dict[str, Any]:
    """LoRA with embedding and head trained beside it."""
    tables = ["embed_tokens"] if name == TIED else ["embed_tokens", "lm_head"]
    return LORA | {"modules_to_save": tables}


def test_what_a_recipe_adds_is_read_and_checked(folders, tagged, tmp_path):
    file = tmp_path / "tokens.txt"
    file.write_text("\n".join(NEW) + "\n")
    assert new_tokens({"new_tokens": str(file)}) == new_tokens({"new_tokens": NEW}) == NEW
    assert new_tokens({}) == [] and (grown(100, 100), grown(100, 101)) == (100, 128)
    for given, words in (
        ("/absent.txt", "cannot be read"),
        (["<a>", "<a>"], "'<a>' is there twice"),
        (["<a>", ""], "a list of texts"),
        (["<|end|>"], "'<|end|>' is a token already"),
    ):
        with pytest.raises(ConfigError, match=words.replace("|", "\\|")):
            hugging_face_tokenizer(str(folders[UNTIED]), new_tokens=given)
    tokenizer = hugging_face_tokenizer(str(folders[UNTIED]), new_tokens=NEW)
    ids = tokenizer.encode("<ask>a<very>")
    assert (ids[0], ids[-1]) == (tokenizer.new_ids[0], tokenizer.new_ids[1])
    assert tokenizer.decode(ids) == "<ask>a<very>"

    def faults(**changes: Any) -> str:
        path = config_of(tmp_path / "run", folders[TIED], tagged, **changes)
        with pytest.raises(ConfigError) as found:
            models.fitting(load(path))
        return str(found.value)

    assert "model.modules_to_save=[embed_tokens]" in faults(model=LORA)
    assert "trains no embeddings" in faults(model={"adapter": "prompt"})
    assert "leave model._component_ out" in faults(model={"_component_": "trainer.models.none"})


@pytest.mark.long
@pytest.mark.parametrize("name", [UNTIED, TIED])
def test_new_tokens_are_trained_in_every_layout(name, folders, tagged, tmp_path):
    """Full and beside LoRA, over FSDP and tensor parallelism, and as others load them."""
    source, rows = folders[name], grown(1024, 1024 + len(NEW))
    lora, both = {"model": saved(name)}, {"tensor_parallel_dim": 2, "batch_size": 4}
    runs: dict[str, tuple[int, dict[str, Any]]] = {
        "full": (1, {}),
        "lora": (1, lora),
        "full_both": (4, both),
        "lora_both": (4, lora | both),
    }
    for ranks in (1, 4):
        paths = {
            run: config_of(tmp_path / run, source, tagged, **changes)
            for run, (own, changes) in runs.items()
            if own == ranks
        }
        train(*paths.values(), ranks=ranks)
    for run in runs:
        assert_same_curve(tmp_path / run, tmp_path / run.partition("_")[0], 2e-5, 1e-4)
        assert_same_tensors(tmp_path / run, tmp_path / run.partition("_")[0], 1e-4)

    # It begins with the mean of the rows, as transformers draws the rows around it.
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    base.resize_token_embeddings(1027, pad_to_multiple_of=64)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "full/export")
    assert len(tokenizer) == 1027 and tokenizer.convert_tokens_to_ids(NEW) == [1024, 1025, 1026]
    ids = torch.tensor([tokenizer("<ask> node<very>big")["input_ids"]])
    first = tensors(source)["model.embed_tokens.weight"].mean(0)
    torch.testing.assert_close(base.get_input_embeddings().weight[1024], first, atol=1e-3, rtol=0)

    for run in ("full", "lora"):
        export = tmp_path / run / "export"
        whole = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
        table = whole.get_input_embeddings().weight
        assert whole.config.vocab_size == len(table) == rows
        # Those that the data have were trained at the input.
        assert (table[1024:1026] - first).abs().max() > 1e-3
        if name == UNTIED:
            torch.testing.assert_close(table[1026], first, atol=1e-4, rtol=0)
    adapter = tmp_path / "lora/export/adapter"
    assert len(AutoTokenizer.from_pretrained(adapter)) == 1027
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(base, adapter).eval()(ids).logits
        torch.testing.assert_close(adapted, whole(ids).logits, rtol=0, atol=2e-5)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert settings["modules_to_save"] == saved(name)["modules_to_save"]
