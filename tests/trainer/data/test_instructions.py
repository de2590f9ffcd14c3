"""The kit's readers of torchtune's datasets against torchtune's own: tokens and labels."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.runs import llama3_tokenizer
from trainer.config import OWN_COMPONENTS, component, instantiate
from trainer.data.tokenizers import hugging_face_tokenizer
from trainer.errors import ConfigError

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

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("instruct", {}, PAIR),
    ("instruct", {"train_on_input": True, **SYSTEM}, PAIR),
    ("instruct", {"column_map": {"input": "q", "output": "a"}}, {"q": "Why?", "a": "So."}),
    ("alpaca", {}, INSTRUCTION),
    ("alpaca", {"train_on_input": False}, INSTRUCTION | {"input": "of a job"}),
    ("alpaca", {"column_map": {"input": "given"}}, INSTRUCTION | {"given": "of a job"}),
    ("chat", CHAT, {"turns": OPENAI}),
    ("chat", CHAT | SYSTEM, {"turns": OPENAI}),
    ("chat", CHAT | {"conversation_style": "sharegpt"}, {"turns": SHAREGPT}),
    ("chat", CHAT | {"conversation_style": "sharegpt", **SYSTEM}, {"turns": SHAREGPT}),
    ("text_completion", {}, {"text": "Slurm starts jobs."}),
    ("text_completion", {"column": "t", "add_eos": False}, {"t": "Slurm starts jobs."}),
]


def rows_file(folder: Path, *rows: dict[str, Any]) -> dict[str, str]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"source": "json", "data_files": str(path)}


@pytest.mark.parametrize("source", ["folder", "torchtune"])
@pytest.mark.parametrize(("name", "keys", "row"), CASES)
def test_samples_are_those_of_torchtune(name, keys, row, source, tmp_path, model_folder):
    of_folder = source == "folder"
    tokenizer = (
        hugging_face_tokenizer(str(model_folder))
        if of_folder
        else instantiate("tokenizer", llama3_tokenizer(tmp_path))
    )
    theirs = getattr(importlib.import_module("torchtune.datasets"), f"{name}_dataset")
    ours = component("dataset", f"torchtune.datasets.{name}_dataset")
    assert ours is not theirs
    given = keys | rows_file(tmp_path, row, row)
    expected, made = theirs(tokenizer, **given), ours(tokenizer, **given)
    assert len(made) == len(expected) == 2
    for key in ("tokens", "labels"):
        assert list(made[1][key]) == list(expected[1][key])


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


def test_torchtunes_tokenizers_refuse_a_call(tmp_path):
    ours = component("dataset", "torchtune.datasets.chat_dataset")
    call = {"tool_calls": [{"function": {"name": "jobs", "arguments": "{}"}}]}
    row = {"turns": [OPENAI[1], {"role": "assistant", "content": "", **call}]}
    samples = ours(llama3_tokenizer(tmp_path), **CHAT, **rows_file(tmp_path, row))
    with pytest.raises(
        ConfigError, match="has tool_calls, which torchtune's tokenizers do not know"
    ):
        samples[0]


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


def test_every_name_is_one_of_torchtune():
    for dotted in OWN_COMPONENTS:
        module, _, name = dotted.rpartition(".")
        assert component("key", dotted) is not getattr(importlib.import_module(module), name)
