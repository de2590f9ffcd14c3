"""Conversations through chat templates of several kinds: what is trained, decoded."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tests.trainer.runs import write_config
from trainer.config import load
from trainer.config import read_yaml as load_yaml
from trainer.data import batches, conversations
from trainer.data.preview import previews
from trainer.data.source import Document, sample
from trainer.data.tokenizers import HuggingFaceTokenizer, hugging_face_tokenizer
from trainer.errors import ConfigError

# As Qwen 3's: earlier answers lose their reasoning; tools stand in the system prompt, and results
# are a user's.
THINKING = """
{%- if tools %}<s>system tools: {{ tools | tojson }}</s>{{ '\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}<s>assistant{{ '\n' }}
{%- if loop.index0 > ns.last %}<think>{{ m.reasoning_content or '' }}</think>{{ '\n' }}{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
{{- '<call>' + call.function.name + call.function.arguments | tojson + '</call>' }}
{%- endfor %}</s>{{ '\n' }}
{%- elif m.role == 'tool' %}<s>user\n<result>{{ m.content }}</result></s>\n
{%- else %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<s>assistant\n{% endif %}"""
# As Mistral's: the system prompt stands in the last question; roles must alternate.
INSTRUCT = """
{%- set ns = namespace(last=-1, system='') %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- if m.role == 'system' %}{% set ns.system = m.content + '\n' %}{% endif %}
{%- if not loop.first and m.role == loop.previtem.role %}
{{- raise_exception('roles must alternate') }}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}[INST]{{ ns.system if loop.index0 == ns.last }}{{ m.content }}[/INST]
{%- elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}
{%- endfor %}"""
MARKED = """
{%- for m in messages %}<s>{{ m.role }}:
{%- if m.role == 'assistant' %}{% generation %} {{ m.content }}</s>{% endgeneration %}
{%- else %} {{ m.content }}</s>{% endif %}
{%- endfor %}"""
TOOLS = [{"type": "function", "function": {"name": "jobs", "parameters": {"type": "object"}}}]


def _sample(samples: Any, index: int, limit: int | None) -> Document:
    ((tokens, trained),), _ = sample(samples, index, limit)
    return tokens, trained


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


CALLS = [
    {"role": "user", "content": "Is it running?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [call("jobs", '{"user": "me"}'), call("nodes", '{"idle": true}')],
    },
    {"role": "tool", "content": "RUNNING"},
    {"role": "assistant", "reasoning_content": "It runs.", "content": "Yes."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "And"}, {"type": "text", "text": " now?"}],
    },
    {"role": "assistant", "reasoning_content": "Still.", "content": "Yes."},
]
PLAIN = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a node?"},
    {"role": "assistant", "content": " A machine. "},
    {"role": "user", "content": "And a rank?"},
    {"role": "assistant", "content": "A process."},
]
CALLED = '<call>jobs{"user": "me"}</call><call>nodes{"idle": true}</call></s>'
# Template, messages, what `train_on` says, and the texts that are trained.
CASES: list[tuple[str, list[dict], str, list[str]]] = [
    (THINKING, CALLS, "all", [CALLED, "Yes.</s>", "<think>Still.</think>\nYes.</s>"]),
    (THINKING, CALLS, "last", ["<think>Still.</think>\nYes.</s>"]),
    (INSTRUCT, PLAIN, "last", ["A process.</s>"]),
    (MARKED, PLAIN, "all", ["  A machine. </s>", " A process.</s>"]),
]


@pytest.fixture
def tokenizer_of(tmp_path, model_folder):
    """The demo model's tokenizer with another chat template."""

    def make(template: str) -> HuggingFaceTokenizer:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(model_folder / name, tmp_path / name)
        (tmp_path / "chat_template.jinja").write_text(template.lstrip())
        return hugging_face_tokenizer(str(tmp_path))

    return make


def opened(tokenizer: Any, folder: Path, *rows: dict, **changes: Any) -> conversations.Chats:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return conversations.conversation_dataset(
        tokenizer, source="json", data_files=str(path), **changes
    )


def trained_texts(tokenizer: HuggingFaceTokenizer, tokens: Any, trained: Any) -> list[str]:
    """What is trained, decoded: a text for each run of tokens."""
    spans: list[list[int]] = []
    for index in range(len(tokens)):
        if trained[index] and not (index and trained[index - 1]):
            spans.append([])
        if trained[index]:
            spans[-1].append(int(tokens[index]))
    return [tokenizer.decode(span, skip_special_tokens=False) for span in spans]


@pytest.mark.parametrize(("template", "messages", "train_on", "expected"), CASES)
def test_exactly_the_chosen_answers_are_trained(
    template, messages, train_on, expected, tokenizer_of, tmp_path
):
    tokenizer = tokenizer_of(template)
    row = {"messages": messages, "tools": TOOLS}
    # The other row gives its calls other arguments: the table then has null for these here.
    other = {"messages": [*CALLS[:1], CALLS[1] | {"tool_calls": [call("x", '{"y": 1}')]}]}
    tokens, trained = _sample(opened(tokenizer, tmp_path, row, other, train_on=train_on), 0, None)
    text = tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
    position = 0
    assert trained_texts(tokenizer, tokens, trained) == expected
    for span in expected:
        position = text.index(span, position) + len(span)
    if template is THINKING and messages is CALLS:
        assert '"name": "jobs"' in text.partition("</s>")[0], "the tools' schemas"


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"chat": PLAIN}, "there are no messages in the column 'messages'; name another one with"),
        ({"messages": []}, "there are no messages in the column"),
        ({"messages": [PLAIN[1], {"role": "assistant", "content": None}]}, "message 2 (assistant)"),
        (
            {"messages": [{"role": "bot", "content": "a"}]},
            "message 1 has the role 'bot'; known: sys",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "message 1 has a part of type image_url; only text can be trained",
        ),
        (
            {"messages": [CALLS[0], CALLS[1] | {"tool_calls": [call("jobs", "{")]}]},
            "message 2 calls jobs with arguments that are no JSON",
        ),
        ({"messages": [PLAIN[1], PLAIN[1]]}, "the chat template refuses a sample: roles must alt"),
    ],
)
def test_what_is_wrong_with_a_conversation_is_told(row, told, tokenizer_of, tmp_path):
    samples = opened(tokenizer_of(INSTRUCT), tmp_path, row)
    with pytest.raises(ConfigError) as caught:
        _sample(samples, 0, None)
    assert told in str(caught.value)


def test_what_the_template_leaves_out_is_noted_or_refused(
    tmp_path, model_folder, dataset, world, tokenizer_of, capsys
):
    """By file and line; the second start, which reads the tokens of the first, notes it too."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in (PLAIN, CALLS)))
    block = {
        "_component_": "trainer.data.conversations.conversation_dataset",
        "source": "json",
        "data_files": str(path),
        "split": "train",
    }
    config = write_config(tmp_path / "run", model_folder, dataset)
    content = load_yaml(config) | {"dataset": block}
    content["tokenizer"]["path"] = str(tmp_path)
    config.write_text(json.dumps(content))
    tokenizer_of(THINKING)
    for _ in range(2):
        batches.build(load(config), world)
        (note,) = [line for line in capsys.readouterr().out.splitlines() if "template" in line]
        assert note == (
            "note: dataset: the model's chat template leaves out the reasoning of earlier answers "
            f"in 1 of 2 samples (first: {path}, line 2)"
        )
    (shown,), faults = previews(load(config), 1)
    assert faults == [] and [f"note: dataset: {text}" for text in shown["notes"]] == [note]
    tokenizer_of(MARKED)
    with pytest.raises(ConfigError) as caught:
        batches.build(load(config), world)
    assert str(caught.value) == (
        f"dataset: {path}, line 2: tokenizer: the chat template leaves out the call of jobs in "
        "message 2 (assistant), the call of nodes in message 2 (assistant); leave this "
        "conversation out, or train a model whose template renders it"
    )


@pytest.mark.parametrize("form", ["object", "text", "table"])
def test_a_null_argument_is_trained_and_a_missing_one_is_not(form, tokenizer_of, tmp_path):
    """A table has null for both, and it stands for the missing ones there."""
    given = [{"query": "a", "limit": None}, {"query": "b"}]
    rows = [
        {"messages": [CALLS[0], said("", arguments if form != "text" else json.dumps(arguments))]}
        for arguments in given
    ]
    tokenizer = tokenizer_of(THINKING)
    samples = opened(tokenizer, tmp_path, *rows)
    if form == "table":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
        files = str(tmp_path / "rows.parquet")
        samples = conversations.conversation_dataset(tokenizer, source="parquet", data_files=files)
    found = [tokenizer.decode(sample(samples, n, None)[0][0][0].tolist()) for n in range(2)]
    both = (
        '{"query": "a"}' if form == "table" else '{"query": "a", "limit": null}',
        '{"query": "b"}',
    )
    assert all(json_text in text for json_text, text in zip(both, found, strict=True)), found


def said(content: str, arguments: Any) -> dict[str, Any]:
    function = {"name": "jobs", "arguments": arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"type": "function", "function": function}],
    }
