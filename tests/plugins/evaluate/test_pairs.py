"""Pairs of answers by scores and by likelihood, and the best of several answers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from runspec.weights import gives_scores
from tests.plugins.evaluate.test_evaluate import SUITE, start
from trainer.errors import ConfigError

ROWS = [
    {
        "prompt": f"Is node {i} up?",
        "chosen": "Yes, it is " + "very " * (i % 5) + "fast.",
        "rejected": "No" + ", really" * (i % 3) + ".",
    }
    for i in range(12)
]


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """The demo model with a score head, as the kit exports one."""
    folder = tmp_path_factory.mktemp("rewards") / "export"
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(
        model_folder, num_labels=1, dtype=torch.float32
    )
    shutil.copytree(model_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(folder)
    return folder


def talk(tokenizer: Any, prompt: str, answer: str) -> torch.Tensor:
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)["input_ids"]


def suite(candidate: Path, tmp_path: Path, task: dict[str, Any], **more: Any) -> dict[str, Any]:
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    tasks = {"pairs": {"data": str(data), **task}}
    return {**SUITE, "candidate": str(candidate), "tasks": tasks, **more}


def test_accuracy_on_pairs_of_a_reward_model_and_of_a_policy(
    tmp_path: Path, reward_model: Path, model_folder: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    scorer = AutoModelForSequenceClassification.from_pretrained(reward_model)
    policy = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)

    def score(row: dict[str, str], name: str) -> float:
        return float(scorer(input_ids=talk(tokenizer, row["prompt"], row[name])).logits)

    def likelihood(row: dict[str, str], name: str) -> float:
        turns = [{"role": "user", "content": row["prompt"]}]
        prompt = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = talk(tokenizer, row["prompt"], row[name])
        begin = prompt["input_ids"].shape[1]
        found = policy(input_ids=ids).logits[0, :-1].log_softmax(-1)
        return float(found.gather(1, ids[0, 1:, None])[begin - 1 :].sum())

    for folder, judged in ((reward_model, score), (model_folder, likelihood)):
        place = tmp_path / folder.name
        place.mkdir()
        result = start(place, suite(folder, place, {"kind": "pair_accuracy"}), [0], 1)
        assert result is not None
        text = (place / "evals/suite.samples.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        with torch.no_grad():
            expected = [{n: judged(row, n) for n in ("chosen", "rejected")} for row in ROWS]
        for line, wanted in zip(lines, expected, strict=True):
            for name, value in wanted.items():
                assert line["candidate"][name] == pytest.approx(value, abs=1e-4)
        found = result["tasks"]["pairs"]["metrics"]["accuracy"]["all"]["candidate"]
        right = [each["chosen"] > each["rejected"] for each in expected]
        assert found["value"] == pytest.approx(sum(right) / len(right))
        assert found["low"] <= found["value"] <= found["high"]


def test_a_reward_model_answers_nothing(tmp_path: Path, reward_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"tasks.pairs: .* is a reward model.*pair_accuracy"):
        start(tmp_path, suite(reward_model, tmp_path, {"kind": "perplexity"}), [0], 1)
    assert gives_scores(reward_model)
