"""The kit's readers of torchtune's datasets: the texts and what is trained of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.config import component
from trainer.data.tokenizers import hugging_face_tokenizer
from trainer.errors import ConfigError
from trainer.layers.batch import IGNORE_INDEX

PAIR = {"input": "What is a queue?", "output": "A line."}
TURNS = ["Be brief.", "What is a node?", "A machine.", "And a task?", "A process."]
OPENAI = [
    {"role": role, "content": text}
    for role, text in zip(["system", *["user", "assistant"] * 2], TURNS, strict=True)
]
SHAREGPT = [
    {"from": role, "value": text}
    for role, text in zip(["system", *["human", "gpt"] * 2], TURNS, strict=True)
]
INSTRUCTION = {"instruction": "Name a state.", "input": "", "output": "PENDING"}
SYSTEM = {"new_system_prompt": "Answer in one word."}
CHAT = {"conversation_column": "turns", "conversation_style": "openai", "train_on_input": True}

ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\nName a state.\n\n### Response:\n"
)
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
    "Name a state.\n\n### Input:\nof a job\n\n### Response:\n"
)
FIRST = "<|user|>What is a node?<|end|><|assistant|>A machine.<|end|>"
REST = "<|user|>And a task?<|end|><|assistant|>A process.<|end|>"
TRAINED = (
    "<|user|>What is a node?<|end|>A machine.<|end|><|user|>And a task?<|end|>A process.<|end|>"
)
BRIEF, ONE = "<|system|>Be brief.<|end|>", "<|system|>Answer in one word.<|end|>"
TEXT = "Slurm starts jobs."

# Dataset, its keys, a row; then the whole text and the trained one behind <|endoftext|>, as
# torchtune 0.6.1 makes them with the demo's tokenizer.
CASES: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    (
        "instruct",
        {},
        PAIR,
        "<|user|>What is a queue?<|end|><|assistant|>A line.<|end|>",
        "A line.<|end|>",
    ),
    (
        "instruct",
        {"train_on_input": True, **SYSTEM},
        PAIR,
        f"{ONE}<|user|>What is a queue?<|end|><|assistant|>A line.<|end|>",
        "<|user|>What is a queue?<|end|>A line.<|end|>",
    ),
    (
        "instruct",
        {"column_map": {"input": "q", "output": "a"}},
        {"q": "Why?", "a": "So."},
        "<|user|>Why?<|end|><|assistant|>So.<|end|>",
        "So.<|end|>",
    ),
    (
        "alpaca",
        {},
        INSTRUCTION,
        f"<|user|>{ALPACA}<|end|><|assistant|>PENDING<|end|>",
        f"<|endoftext|><|user|>{ALPACA}<|end|>PENDING<|end|>",
    ),
    (
        "alpaca_cleaned",
        {"train_on_input": False},
        INSTRUCTION | {"input": "of a job"},
        f"<|user|>{WITH_INPUT}<|end|><|assistant|>PENDING<|end|>",
        "PENDING<|end|>",
    ),
    (
        "alpaca",
        {"column_map": {"input": "given"}},
        INSTRUCTION | {"given": "of a job"},
        f"<|user|>{WITH_INPUT}<|end|><|assistant|>PENDING<|end|>",
        f"<|endoftext|><|user|>{WITH_INPUT}<|end|>PENDING<|end|>",
    ),
    (
        "chat",
        CHAT,
        {"turns": OPENAI},
        f"{BRIEF}{FIRST}{REST}",
        f"<|endoftext|>{BRIEF}{TRAINED}",
    ),
    ("chat", CHAT | SYSTEM, {"turns": OPENAI}, f"{ONE}{FIRST}{REST}", TRAINED),
    (
        "chat",
        CHAT | {"conversation_style": "sharegpt"},
        {"turns": SHAREGPT},
        f"{BRIEF}{FIRST}{REST}",
        f"<|endoftext|>{BRIEF}{TRAINED}",
    ),
    (
        "chat",
        CHAT | {"conversation_style": "sharegpt", **SYSTEM},
        {"turns": SHAREGPT},
        f"{ONE}{FIRST}{REST}",
        TRAINED,
    ),
    ("text_completion", {}, {"text": TEXT}, f"{TEXT}<|end|>", f"<|endoftext|>{TEXT}<|end|>"),
    (
        "text_completion",
        {"column": "t", "add_eos": False},
        {"t": TEXT},
        TEXT,
        f"<|endoftext|>{TEXT}",
    ),
]


def rows_file(folder: Path, *rows: dict[str, Any]) -> dict[str, str]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"source": "json", "data_files": str(path)}


@pytest.mark.parametrize(("name", "keys", "row", "text", "trained"), CASES)
def test_samples_are_those_of_torchtune(name, keys, row, text, trained, tmp_path, model_folder):
    tokenizer = hugging_face_tokenizer(str(model_folder))
    ours = component("dataset", f"torchtune.datasets.{name}_dataset")
    made = ours(tokenizer, **keys, **rows_file(tmp_path, row, row))
    assert len(made) == 2
    tokens, labels = made[1]["tokens"], [t for t in made[1]["labels"] if t != IGNORE_INDEX]
    assert tokenizer.decode(tokens, False) == f"<|endoftext|>{text}"
    assert tokenizer.decode(labels, False) == trained


@pytest.mark.parametrize(
    ("turns", "told"),
    [
        (SHAREGPT[:1], "there must be at least 2 messages, and there are 1"),
        ([SHAREGPT[2], *SHAREGPT[1:]], "message 1 (assistant) does not follow one of the user"),
        ([SHAREGPT[1], *SHAREGPT[1:]], "messages 1 and 2 are both of the user"),
        ([*SHAREGPT[1:3], SHAREGPT[0]], "message 3 is a system message, which must come first"),
        (
            [SHAREGPT[1], {"from": "gpt", "value": None}],
            "message 2 (gpt) has no text in 'value'",
        ),
        (
            [SHAREGPT[1], {"from": "bot", "value": "Hm."}],
            "message 2 is from 'bot'; known: system, ",
        ),
        ("Hm?", "the column 'conversations' has no list of messages"),
        (None, "the column 'conversations' has no list of messages"),
    ],
)
def test_turns_in_another_order_are_refused(turns, told, tmp_path, model_folder):
    ours = component("dataset", "torchtune.datasets.chat_dataset")
    tokenizer = hugging_face_tokenizer(str(model_folder))
    keys = {"conversation_column": "conversations", "conversation_style": "sharegpt"}
    samples = ours(tokenizer, **keys, **rows_file(tmp_path, {"conversations": turns}))
    with pytest.raises(ConfigError) as caught:
        samples[0]
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (PAIR | {"output": 42}, "the column 'output' contains 42, which is not a text"),
        (PAIR | {"output": None}, "there is no 'output'"),
        (PAIR | {"input": " \n"}, "the question is empty"),
    ],
)
def test_what_is_no_text_is_refused(row, told, tmp_path, model_folder):
    ours = component("dataset", "torchtune.datasets.instruct_dataset")
    tokenizer = hugging_face_tokenizer(str(model_folder))
    with pytest.raises(ConfigError, match=told):
        ours(tokenizer, **rows_file(tmp_path, row))[0]
