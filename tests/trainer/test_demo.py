"""The demo's model and tokenizer, and the way from a trained run to an answer."""

import json
from pathlib import Path

import pytest
from torchtune.data import Message

from tests.trainer.forks import run
from tests.trainer.runs import ROOT, progress, train, write_config
from trainer import config as configs
from trainer import demo
from trainer.data.tokenizers import HuggingFaceTokenizer, hugging_face_tokenizer
from trainer.errors import ConfigError

DATASET = ROOT / "configs/datasets/slurm_qa.jsonl"
CONVERSATION = [
    Message(role="user", content="What is a rank?", masked=True),
    Message(role="assistant", content="One process of a run."),
    Message(role="user", content="And a node?", masked=True),
    Message(role="assistant", content="One machine."),
]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    run("trainer.demo", tmp_path / "one", "--dataset", DATASET).check_returncode()
    demo.make(tmp_path / "two", DATASET, seed=0)
    demo.make(tmp_path / "three", DATASET, seed=1)
    one, two, three = (content(tmp_path / name) for name in ("one", "two", "three"))
    assert one == two
    assert one["model.safetensors"] != three["model.safetensors"]
    assert one["tokenizer.json"] == three["tokenizer.json"]
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two", "three"}


@pytest.mark.parametrize("text", [None, "", "{", '{"question": 1}\n'])
def test_unusable_dataset_leaves_no_folder(text: str | None, tmp_path: Path) -> None:
    dataset = tmp_path / "data.jsonl"
    if text is not None:
        dataset.write_text(text)
    with pytest.raises(ConfigError, match="--dataset"):
        demo.make(tmp_path / "model", dataset)
    assert not (tmp_path / "model").exists()


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> HuggingFaceTokenizer:
    return hugging_face_tokenizer(str(model_folder))


def test_tokens_equal_transformers_chat_template(
    tokenizer: HuggingFaceTokenizer, model_folder: Path
) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(model_folder)
    turns = [{"role": m.role, "content": m.text_content} for m in CONVERSATION]
    expected = reference.apply_chat_template(turns, return_dict=True)["input_ids"]
    tokens, mask = tokenizer.tokenize_messages(CONVERSATION)
    assert tokens == expected
    assert len(mask) == len(tokens)


def test_only_answers_and_their_end_are_trained(tokenizer: HuggingFaceTokenizer) -> None:
    tokens, mask = tokenizer.tokenize_messages(CONVERSATION)
    trained = [t for t, masked in zip(tokens, mask, strict=True) if not masked]
    text = tokenizer.decode(trained, skip_special_tokens=False)
    assert text == "One process of a run.<|end|>One machine.<|end|>"


def test_white_space_after_the_end_token_is_masked(model_folder: Path, tmp_path: Path) -> None:
    """Templates such as ChatML write a line break that the model never has to."""
    tokenizer = with_template(
        model_folder,
        tmp_path,
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    )
    tokens, mask = tokenizer.tokenize_messages(CONVERSATION)
    trained = [t for t, masked in zip(tokens, mask, strict=True) if not masked]
    text = tokenizer.decode(trained, skip_special_tokens=False)
    assert text == "One process of a run.<|end|>One machine.<|end|>"


def test_train_on_input_trains_the_questions_too(tokenizer: HuggingFaceTokenizer) -> None:
    messages = [Message(role=m.role, content=m.text_content) for m in CONVERSATION[:2]]
    tokens, mask = tokenizer.tokenize_messages(messages)
    trained = [t for t, masked in zip(tokens, mask, strict=True) if not masked]
    assert "What is a rank?<|end|>" in tokenizer.decode(trained, skip_special_tokens=False)


def test_max_seq_len_cuts(model_folder: Path) -> None:
    tokens, mask = hugging_face_tokenizer(str(model_folder), 9).tokenize_messages(CONVERSATION)
    assert len(tokens) == len(mask) == 9


def test_template_that_drops_earlier_turns_is_refused(model_folder: Path, tmp_path: Path) -> None:
    tokenizer = with_template(
        model_folder,
        tmp_path,
        "{% for m in messages[-2:] %}{{ m.role }}{{ m.content }}{% endfor %}",
    )
    with pytest.raises(ConfigError, match="leaves out the content in message 1"):
        tokenizer.tokenize_messages(CONVERSATION)


def test_template_that_raises_is_a_clear_error(model_folder: Path, tmp_path: Path) -> None:
    tokenizer = with_template(model_folder, tmp_path, "{{ raise_exception('no system role') }}")
    with pytest.raises(ConfigError, match="refuses a sample: no system role"):
        tokenizer.tokenize_messages(CONVERSATION)


def with_template(model_folder: Path, folder: Path, template: str) -> HuggingFaceTokenizer:
    (folder / "tokenizer.json").write_bytes((model_folder / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return hugging_face_tokenizer(str(folder))


def test_recipe_is_a_config_of_the_demo_model(tmp_path: Path) -> None:
    """configs/recipes/demo.yaml, resolved as train.yaml is, fits trainer/demo.py."""
    from omegaconf import OmegaConf

    recipe = OmegaConf.load(ROOT / "configs/recipes/demo.yaml")
    recipe = OmegaConf.merge(
        {"output_dir": str(tmp_path), "models_root": str(tmp_path), "repo_root": str(ROOT)}, recipe
    )
    content = OmegaConf.to_container(recipe, resolve=True)
    for key in ("description", "entry", "resources", "prepare", "models_root", "repo_root"):
        del content[key]
    config = configs.parse(content)
    assert config.notes == ()
    assert config.model["vocab_size"] == demo.VOCAB_SIZE
    assert config.model["num_layers"] == demo.ARCHITECTURE["num_hidden_layers"]
    questions = {json.loads(line)["question"] for line in DATASET.read_text().splitlines()}
    assert set(config.generate["prompts"]) <= questions


def test_run_answers_and_generate_answers_by_hand(tmp_path: Path, model_folder: Path) -> None:
    """Two pairs are learned by heart, and the exported folder knows them."""
    dataset = tmp_path / "two.jsonl"
    rows = [json.loads(line) for line in DATASET.read_text().splitlines()[:2]]
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = write_config(
        tmp_path / "run",
        model_folder,
        dataset,
        batch_size=2,
        epochs=40,
        max_steps=None,
        generate={"prompts": [row["question"] for row in rows], "max_new_tokens": 64},
    )
    train(path)
    asked = run("trainer.generate", path)
    assert asked.returncode == 0, asked.stderr
    output = asked.stdout
    samples = [json.loads(x) for x in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    expected = [{"prompt": row["question"], "answer": row["answer"]} for row in rows]
    assert samples == expected
    assert f"answer    {rows[0]['answer']}" in output
    assert progress(tmp_path / "run")["state"] == "finished"

    folder = tmp_path / "run/export"
    asked = run("trainer.generate", folder, rows[1]["question"])
    assert asked.returncode == 0 and asked.stdout == rows[1]["answer"] + "\n"
    assert asked.stderr == ""
    missing = run("trainer.generate", tmp_path / "nothing", "a")
    assert missing.returncode == 1
    assert missing.stderr.startswith("error: ") and missing.stderr.count("\n") == 1
