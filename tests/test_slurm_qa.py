"""The demo's instruction dataset: one well-formed and distinct question and answer per line."""

import json
import re
from pathlib import Path

from benchmarks import reference

DATASET = Path(__file__).parents[1] / "configs" / "datasets" / "slurm_qa.jsonl"


def fault(question: str, answer: str) -> str:
    """What is wrong with a pair; "" if nothing is."""
    if any(text != " ".join(text.split()) for text in (question, answer)):
        return "blanks"
    if not (question.endswith("?") and 4 <= len(question.split()) <= 14):
        return "the question's end or length"
    if not (answer.endswith(".") and 8 <= len(answer.split()) <= 35):
        return "the answer's end or length"
    if len(re.findall(r"[.?!](?:\s|$)", answer)) > 2:
        return "more than two sentences"
    return "markup" * bool(re.search(r"`|\*\*|<\w+>|https?://(?!localhost)", answer))


def test_the_pairs_are_well_formed_distinct_and_about_commands_that_exist():
    text = DATASET.read_text(encoding="ascii")
    pairs = [json.loads(line) for line in text.splitlines()]
    assert 360 <= len(pairs) <= 420 and {tuple(pair) for pair in pairs} == {("question", "answer")}
    assert [(pair, why) for pair in pairs if (why := fault(**pair))] == []
    plain = {" ".join(re.findall(r"[a-z0-9]+", pair["question"].lower())) for pair in pairs}
    assert len(plain) == len(pairs)
    known = set(re.findall(r"cookbook ([\w-]+)", reference.commands()))
    mentioned = set(re.findall(r"\bcookbook +([\w-]+)", text))
    assert {"recipes", "submit", "status", "logs", "cancel", "tensorboard"} <= mentioned <= known
    (answer,) = [p["answer"] for p in pairs if p["question"].startswith("How do I submit the demo")]
    assert "cookbook submit --recipe demo --nodes 2 --watch" in answer
