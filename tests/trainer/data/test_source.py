"""What is trained of a sample: answers only, long texts whole, and no answer with the weight 0."""

import io
import json
from contextlib import redirect_stdout
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from launcher.recipe import load as recipes
from launcher.recipe import sweep, torchtune
from tests.trainer.runs import write_config
from trainer.config import load, parse, read_yaml
from trainer.data import batches
from trainer.data.tokenizers import hugging_face_tokenizer
from trainer.errors import ConfigError

ALPACA = {"instruction": "Name a state.", "input": "Slurm", "output": "PENDING"}
ROW = 64


@pytest.fixture
def build(tmp_path, model_folder, dataset, world):
    """The training data of rows in a file, and what the log says of them."""

    def of(rows: list[dict], block: dict, tokenizer: dict | None = None) -> Any:
        config = write_config(tmp_path / "run", model_folder, dataset)
        content = read_yaml(config)
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        content["dataset"] = {"source": "json", "data_files": str(file), "split": "train", **block}
        content["tokenizer"] |= tokenizer or {}
        config.write_text(json.dumps(content))
        with redirect_stdout(io.StringIO()) as said:
            found = batches.build(load(config), world).training
        found.said = said.getvalue().splitlines()
        return found

    return of


@pytest.fixture
def texts(model_folder):
    """Decode the trained tokens of each sample."""
    tokenizer = hugging_face_tokenizer(str(model_folder))

    def of(samples: Any) -> list[str]:
        return [
            tokenizer.decode(tokens[trained].tolist(), skip_special_tokens=False)
            for tokens, trained in samples
        ]

    return of


# Prompts


@pytest.mark.parametrize("name", ["one_gpu", "four_gpus"])
def test_the_shipped_sweeps_train_the_answers_only(name, build, texts):
    shipped = sweep.load(name)
    recipe = recipes.load(shipped.recipe, shipped.cells[0].overrides)
    assert recipe.notes == []
    given = {k: v for k, v in recipe.config["dataset"].items() if k not in ("source", "split")}
    assert texts(build([ALPACA], given).rows.samples) == ["PENDING<|end|>"]


def test_a_stock_config_keeps_torchtunes_meaning_and_says_so(tmp_path):
    name = "llama3_2/1B_lora_single_device"
    recipe = recipes.load(name)
    assert recipe.config["dataset"]["train_on_input"] is True
    said = (
        "dataset.train_on_input: true, so the prompts are also trained; set "
        "dataset.train_on_input=False to train the answers only"
    )
    assert said in recipe.notes
    assert said in parse(recipe.train_config(tmp_path, str(tmp_path / "run"))).notes
    assert said not in recipes.load(name, ["dataset.train_on_input=False"]).notes
    # A copy is a recipe of one's own.
    copy = tmp_path / "mine.yaml"
    copy.write_bytes(torchtune.configs()[name].read_bytes())
    recipe = recipes.load(str(copy))
    config = parse(recipe.train_config(tmp_path, str(tmp_path / "run")))
    assert config.dataset["train_on_input"] is False
    (note,) = [note for note in config.notes if note in recipe.notes]
    assert note.startswith("dataset.train_on_input: not set, so only the answers are trained")


# Long samples


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "alone"])
def test_no_token_of_a_long_text_is_left_out(packed, build, model_folder):
    """Every token but the first of a text is predicted once, as it is without a limit."""
    tokenizer = hugging_face_tokenizer(str(model_folder))
    rng = np.random.default_rng(0)
    wanted = []
    rows = []
    for count in (10, ROW, ROW + 1, 2 * ROW - 1, 300, 2, 25):
        # Ids that are no special token: the text is tokenised to others, of about that number.
        text = tokenizer.decode(rng.integers(300, 1000, count).tolist())
        rows.append({"text": text})
        wanted.append(tokenizer.encode(text, add_bos=True, add_eos=True))
    block = {"_component_": "torchtune.datasets.text_completion_dataset", "column": "text"}
    found = build(rows, block | {"packed": packed}, {"max_seq_len": ROW})
    samples = found.rows.samples
    assert samples.lengths.max() == ROW and len(found.rows) > 7
    for number, whole in enumerate(wanted):
        parts = [samples[int(i)] for i in np.flatnonzero(samples.sources == number)]
        assert np.concatenate([tokens[trained] for tokens, trained in parts]).tolist() == whole
        for before, after in pairwise(parts):
            assert before[0][-1] == after[0][0] and not after[1][0]
    assert samples.targets.sum() == sum(len(whole) - 1 for whole in wanted)
    labels = [found.rows.collate([found.rows[i]]).target_count for i in range(len(found.rows))]
    assert sum(labels) == samples.targets.sum()
    longer = sum(len(whole) > ROW for whole in wanted)
    assert found.said == [
        f"note: dataset: {longer} of 7 texts are longer than tokenizer.max_seq_len=64: they go on "
        f"in {len(samples) - 7} further samples, and no token is left out"
    ]
    assert samples.origin(len(samples) - 1).endswith("rows.jsonl, line 7")


def test_what_is_cut_off_an_answer_is_counted(build):
    block = {
        "_component_": "torchtune.datasets.instruct_dataset",
        "column_map": {"input": "q", "output": "a"},
    }
    rows = [{"q": "Why?", "a": "So. " * count} for count in (1, 40, 50)]
    whole = build(rows, block).rows.samples.lengths
    found = build(rows, block, {"max_seq_len": 32})
    assert found.rows.samples.lengths.tolist() == [whole[0], 32, 32]
    assert found.said == [
        "note: dataset: 2 of 3 samples are longer than tokenizer.max_seq_len=32: they are cut "
        f"there, and {whole[1:].sum() - 64} of {whole.sum()} tokens are left out"
    ]


# Weights of messages

QUESTION = {"role": "user", "content": "And?"}
CHAT = {
    "_component_": "torchtune.datasets.chat_dataset",
    "conversation_column": "messages",
    "conversation_style": "openai",
}


def turns(*weights: Any) -> list[dict]:
    """A conversation whose answers have these weights; one without a weight has none."""
    answers = [
        {"role": "assistant", "content": f"Answer {number}."}
        | ({} if weight is None else {"weight": weight})
        for number, weight in enumerate(weights, 1)
    ]
    return [turn for answer in answers for turn in (QUESTION, answer)]


@pytest.mark.parametrize(
    ("weights", "train_on", "expected"),
    [
        ((0, 1, None), "all", "Answer 2.<|end|>Answer 3.<|end|>"),
        ((1, 0), "all", "Answer 1.<|end|>"),
        ((1, 0), "last", ""),
        ((0, 1), "last", "Answer 2.<|end|>"),
    ],
)
def test_an_answer_with_the_weight_0_is_not_trained(weights, train_on, expected, build, texts):
    block = {"_component_": "trainer.data.conversations.conversation_dataset"}
    rows = [{"messages": turns(*weights)}, {"messages": turns(1)}]
    samples = build(rows, block | {"train_on": train_on}).rows.samples
    assert texts(samples) == [expected, "Answer 1.<|end|>"]


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        (turns(1, 0.5), "message 4 has the weight 0.5; it must be 0 or 1"),
        (turns("0"), "message 2 has the weight '0'; it must be 0 or 1"),
        (turns(True), "message 2 has the weight True; it must be 0 or 1"),
        ([QUESTION | {"weight": 1}, *turns(1)[1:]], "message 1 (user) has the weight 1; only"),
    ],
)
def test_another_weight_is_refused_by_file_and_line(messages, told, build):
    plain = [{"role": "user", "content": "Hm?"}, {"role": "assistant", "content": "Hm."}]
    with pytest.raises(ConfigError) as caught:
        build([{"messages": plain}, {"messages": messages}], CHAT)
    assert f"rows.jsonl, line 2: {told}" in str(caught.value)


def test_a_weight_counts_beside_trained_prompts(build, texts):
    samples = build([{"messages": turns(1, 0)}], CHAT | {"train_on_input": True}).rows.samples
    (trained,) = texts(samples)
    assert "And?" in trained and "Answer 1." in trained and "Answer 2." not in trained
