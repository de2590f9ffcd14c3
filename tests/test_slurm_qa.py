"""The demo's instruction dataset: one well-formed and distinct question and answer per line."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

DATASET = Path(__file__).parents[1] / "configs" / "datasets" / "slurm_qa.jsonl"
COMMANDS = {
    "recipes",
    "doctor",
    "download",
    "check",
    "submit",
    "status",
    "logs",
    "watch",
    "cancel",
    "resume",
    "results",
    "sweep",
    "profile",
    "tensorboard",
}


@pytest.fixture(scope="module")
def pairs() -> list[dict[str, str]]:
    return [json.loads(line) for line in DATASET.read_text(encoding="ascii").splitlines()]


def test_number_of_pairs(pairs):
    assert 360 <= len(pairs) <= 420


def test_each_line_holds_a_question_and_an_answer(pairs):
    assert [pair for pair in pairs if list(pair) != ["question", "answer"]] == []
    texts = [text for pair in pairs for text in pair.values()]
    assert [text for text in texts if text != " ".join(text.split())] == []
    assert [pair["question"] for pair in pairs if not pair["question"].endswith("?")] == []
    assert [pair["answer"] for pair in pairs if not pair["answer"].endswith(".")] == []


def test_lengths_in_words(pairs):
    questions = [pair["question"] for pair in pairs]
    answers = [pair["answer"] for pair in pairs]
    assert [text for text in questions if not 4 <= len(text.split()) <= 14] == []
    assert [text for text in answers if not 8 <= len(text.split()) <= 35] == []


def test_answers_are_one_or_two_sentences_without_markup(pairs):
    answers = [pair["answer"] for pair in pairs]
    assert [text for text in answers if len(re.findall(r"[.?!](?:\s|$)", text)) > 2] == []
    markup = re.compile(r"`|\*\*|<\w+>|https?://(?!localhost)")
    assert [text for text in answers if markup.search(text)] == []


def test_questions_are_distinct(pairs):
    plain = [" ".join(re.findall(r"[a-z0-9]+", pair["question"].lower())) for pair in pairs]
    assert [question for question, count in Counter(plain).items() if count > 1] == []


def test_commands_of_the_kit_exist(pairs):
    text = "\n".join(f"{pair['question']}\n{pair['answer']}" for pair in pairs)
    mentioned = set(re.findall(r"\bcookbook +([\w-]+)", text))
    assert {"recipes", "submit", "status", "logs", "cancel", "tensorboard"} <= mentioned
    assert mentioned <= COMMANDS


def test_the_dataset_answers_how_to_submit_the_demo(pairs):
    answers = {pair["question"]: pair["answer"] for pair in pairs}
    answer = answers["How do I submit the demo recipe on two nodes?"]
    assert "cookbook submit --recipe demo --nodes 2 --watch" in answer
