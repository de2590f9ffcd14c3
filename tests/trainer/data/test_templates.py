"""The chat templates of all shipped models: what is trained, decoded, and what is refused or noted.

templates/ has a template for each family of models, rebuilt from what is public about its format.
templates/trained.json holds, for each of them and each conversation, the texts that are trained, or
the reason why the conversation is refused.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers

from trainer.data.conversations import turns_of
from trainer.data.tokenizers import HuggingFaceTokenizer, hugging_face_tokenizer
from trainer.errors import ConfigError

ROOT = Path(__file__).parents[3]
TEMPLATES = Path(__file__).parent / "templates"
EXPECTED = json.loads((TEMPLATES / "trained.json").read_text(encoding="utf-8"))
# Template of a model's name on the hub, and the tokens that end its answers.
FAMILIES = {
    "DeepSeek-V3": ("deepseek_v3", ["<｜end▁of▁sentence｜>"]),
    "gemma-2": ("gemma2", ["<end_of_turn>"]),
    "gemma-3": ("gemma3", ["<end_of_turn>"]),
    "gemma-4": ("gemma4", ["<turn|>", "<|tool_response>"]),
    "GLM-4.5": ("glm4_5", ["<|endoftext|>", "<|user|>", "<|observation|>"]),
    "gpt-oss": ("gpt_oss", ["<|return|>", "<|call|>"]),
    "Llama-3": ("llama3_1", ["<|eot_id|>"]),
    "Llama-4": ("llama4", ["<|eot|>"]),
    "Ministral-3": ("ministral3", ["</s>"]),
    "Mistral-7B": ("mistral_v3", ["</s>"]),
    "Mistral-Small": ("mistral_small", ["</s>"]),
    "phi-4": ("phi4", ["<|im_end|>"]),
    "Phi-4-mini": ("phi4_mini", ["<|end|>", "<|endoftext|>"]),
    "Qwen2.5": ("qwen2_5", ["<|im_end|>"]),
    "Qwen3-": ("qwen3", ["<|im_end|>"]),
    "Qwen3.5": ("qwen3_5", ["<|im_end|>"]),
    "SmolLM3": ("smollm3", ["<|im_end|>"]),
    # No recipe has these two; they do what no other template does.
    "Command-R7B": ("cohere", ["<|END_OF_TURN_TOKEN|>"]),
    "Meta-Llama-3-8B": ("llama3_0", ["<|eot_id|>"]),
}
ENDS = dict(FAMILIES.values())


def said(role: str, content: str | None, **keys: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **keys}


def call(name: str, arguments: str, number: int = 1) -> dict[str, Any]:
    return {"id": f"abcdefgh{number}", "function": {"name": name, "arguments": arguments}}


ASKED, NODE = said("user", "Is it running?"), said("user", "What is a node?")
MACHINE, RUNS = said("assistant", "A machine."), said("assistant", "It runs.")
JOBS = said("assistant", None, tool_calls=[call("jobs", '{"user": "me"}')])
RESULT = said("tool", "RUNNING", tool_call_id="abcdefgh1")
TURNS = [NODE, MACHINE, said("user", "And a rank?"), said("assistant", "A process.")]
CONVERSATIONS = {
    "turns": TURNS,
    "system": [said("system", "Be brief."), *TURNS],
    "developer": [said("developer", "Be brief."), *TURNS[:2]],
    "answer first": [said("assistant", "Welcome here."), *TURNS[:2]],
    "reasoning": [
        NODE,
        MACHINE | {"thinking": "I think."},
        TURNS[2],
        TURNS[3] | {"reasoning": "I ponder."},
    ],
    "call": [ASKED, JOBS | {"reasoning_content": "I look."}, RESULT, RUNS],
    "call beside text": [ASKED, JOBS | {"content": "Let me look."}, RESULT, RUNS],
    "two calls": [
        ASKED,
        JOBS | {"tool_calls": [*JOBS["tool_calls"], call("nodes", '{"idle": 3}', 2)]},
        RESULT,
        said("tool", "IDLE", tool_call_id="abcdefgh2"),
        RUNS,
    ],
    "call last": [ASKED, JOBS],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {}}}
    for name in ("jobs", "nodes")
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory, model_folder):
    """A tokenizer for each template, with the template's special tokens."""
    made = {}
    for name, ends in ENDS.items():
        template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
        folder = tmp_path_factory.mktemp(name)
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        settings = {"bos_token": "<s>", "eos_token": ends[-1]}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        spaces = name == "mistral_v3"
        tokenizer = (
            with_spaces() if spaces else Tokenizer.from_file(str(model_folder / "tokenizer.json"))
        )
        special = set(re.findall(r"<[|/]?[^<>\s']{1,40}>|\[/?[A-Z_]{3,}\]", template))
        tokenizer.add_special_tokens(
            [AddedToken(text, normalized=False) for text in sorted(special | {"<s>", *ends})]
        )
        tokenizer.save(str(folder / "tokenizer.json"))
        ids = [tokenizer.token_to_id(end) for end in ends]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        made[name] = hugging_face_tokenizer(str(folder))
    return made


def with_spaces() -> Tokenizer:
    """As Mistral's: a space belongs to the word behind it, and one is put before each text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    text = json.dumps([CONVERSATIONS, TOOLS]) * 2
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False)
    tokenizer.train_from_iterator(re.findall(r" ?\S+", text), trainer)
    return tokenizer


def trained(tokenizer: HuggingFaceTokenizer, messages: list[dict[str, Any]]) -> list[str]:
    """What is trained of all answers, decoded: a text for each run of tokens."""
    turns = turns_of(messages)
    answers = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    tools = TOOLS if any("tool_calls" in turn for turn in turns) else None
    tokens, mask = tokenizer.tokenize_turns(turns, answers, tools)
    runs = "".join(" " if masked else "x" for masked in mask)
    return [
        tokenizer.decode(tokens[run.start() : run.end()], skip_special_tokens=False)
        for run in re.finditer("x+", runs)
    ]


def test_each_shipped_model_has_its_template():
    for path in (ROOT / "configs/base/models").glob("*.yaml"):
        name = yaml.safe_load(path.read_text())["hub"]["model"].partition("/")[2]
        assert any(name.startswith(family) for family in FAMILIES), name
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == set(ENDS) == set(EXPECTED)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", ENDS)
def test_answers_are_trained_or_refused(template, conversation, tokenizers):
    tokenizer, messages = tokenizers[template], CONVERSATIONS[conversation]
    expected = EXPECTED[template][conversation]
    if "refused" in expected:
        with pytest.raises(ConfigError) as caught:
            trained(tokenizer, messages)
        assert str(caught.value).startswith(f"tokenizer: the chat template {expected['refused']}")
        return
    texts = trained(tokenizer, messages)
    assert texts == expected["trained"]
    left_out = [what.rpartition("leaves out ")[2] for what in sorted(tokenizer.take_left_out())]
    assert left_out == expected.get("left out", [])
    # What holds of each of them, whatever the file says.
    answers = [message for message in messages if message["role"] == "assistant"]
    assert len(texts) == len(answers)
    for number, (text, answer) in enumerate(zip(texts, answers, strict=True), 1):
        beside = "tool_calls" in answer and "the text beside tool calls" in left_out
        moved = template == "gemma4" and conversation == "call beside text"
        assert beside or moved or (answer["content"] or "") in text
        for made in answer.get("tool_calls", []):
            assert made["function"]["name"] in text
        # Harmony's earlier answers end in a token that no model is to write.
        earlier = template == "gpt_oss" and number < len(answers) and "tool_calls" not in answer
        assert earlier or any(text.endswith(end) for end in ENDS[template])
        prompts = [message["content"] for message in messages if message["role"] != "assistant"]
        assert not any(prompt in text for prompt in prompts)


def test_system_prompt_stands_where_it_does_in_the_prompt(tokenizers):
    """Mistral 7B's template renders it only if no answer follows; it stands there all the same."""
    tokenizer, messages = tokenizers["mistral_v3"], CONVERSATIONS["system"]
    asked = tokenizer.render(messages[:-1])
    assert "Be brief.\n\nAnd a rank?" in asked
    assert "Be brief." not in tokenizer.render(messages)
    tokens, _ = tokenizer.tokenize_turns(messages, [4])
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    assert "".join(text.split()) == "".join(f"{asked} A process.</s>".split())


def test_first_word_after_a_space_is_trained(tokenizers):
    """The space before an answer and its first word are one token."""
    tokenizer = tokenizers["mistral_v3"]
    tokens, mask = tokenizer.tokenize_turns(CONVERSATIONS["system"], [2, 4])
    words = [
        tokenizer.decode([token], False) for token, m in zip(tokens, mask, strict=True) if not m
    ]
    assert "".join(words).replace(" ", "") == "Amachine.</s>Aprocess.</s>"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (
            "{% for m in messages %}{{ m.content ~ m.content | length }}|{% endfor %}",
            "changes texts",
        ),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}|{% endfor %}", "leaves out"),
    ],
)
def test_spans_that_cannot_be_verified_are_refused(template, text, tokenizers, tmp_path):
    folder = tokenizers["phi4"]._folder
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError, match=f"the chat template {text}"):
        hugging_face_tokenizer(str(tmp_path)).tokenize_turns(TURNS, [1, 3])


@pytest.mark.parametrize("template", [name for name in ENDS if name != "mistral_v3"])
@pytest.mark.parametrize(
    "text",
    [
        "  spaced \n",
        'He said "no" \\ {"a": 1}',
        "<tool_response>x</tool_response>",
        "你好 🙂👩‍👩‍👧",
        "qz1qz qz",
        "a",
    ],
)
def test_odd_texts_are_found(text, template, tokenizers):
    """Questions have the same texts, so that only its place tells an answer."""
    messages = [said("user", text), said("assistant", text), TURNS[2], said("assistant", text)]
    shown = trained(tokenizers[template], messages)
    for found, known, answer in zip(
        shown, EXPECTED[template]["turns"]["trained"], TURNS[1::2], strict=True
    ):
        assert "".join(found.split()) == "".join(known.replace(answer["content"], text).split())


def test_a_switch_in_the_system_prompt_is_no_text(tokenizers):
    """SmolLM3's template looks for it, and a mark within it would hide it."""
    tokenizer = tokenizers["smollm3"]
    texts = trained(tokenizer, [said("system", "/no_think"), *TURNS])
    assert texts == ["A machine.<|im_end|>", "A process.<|im_end|>"]
    assert not tokenizer.take_left_out()
