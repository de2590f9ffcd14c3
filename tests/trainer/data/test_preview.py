"""What check --samples shows is what training sees: the same tokens, labels and rows, decoded."""

import dataclasses
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.trainer.runs import write_config
from trainer.config import TrainConfig, instantiate, load, read_yaml
from trainer.data import batches
from trainer.data.preview import previews, spans
from trainer.data.tokenizers import hugging_face_tokenizer
from trainer.layers.batch import IGNORE_INDEX
from trainer.parallel import world as distributed

SHAREGPT = [
    {"from": "human", "value": "Was heißt 節點?"},
    {"from": "gpt", "value": "節點 ist ein Knoten. 👩‍👩‍👧"},
]
ROLES = {"human": "user", "gpt": "assistant"}
OPENAI = [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in SHAREGPT]
TORCHTUNE = "torchtune.datasets"
# The dataset's block and one of its rows.
KINDS: dict[str, tuple[dict, dict]] = {
    "instruct": (
        {
            "_component_": f"{TORCHTUNE}.instruct_dataset",
            "column_map": {"input": "q", "output": "a"},
        },
        {"q": "Warum?", "a": "Darum 節."},
    ),
    "sharegpt": (
        {
            "_component_": f"{TORCHTUNE}.chat_dataset",
            "conversation_column": "turns",
            "conversation_style": "sharegpt",
        },
        {"turns": SHAREGPT},
    ),
    "openai": (
        {
            "_component_": f"{TORCHTUNE}.chat_dataset",
            "conversation_column": "messages",
            "conversation_style": "openai",
        },
        {"messages": OPENAI},
    ),
    "conversations": (
        {"_component_": "trainer.data.conversations.conversation_dataset", "train_on": "last"},
        {"messages": [*OPENAI, *OPENAI]},
    ),
    "alpaca": (
        {"_component_": f"{TORCHTUNE}.alpaca_dataset"},
        {"instruction": "Nenne einen Zustand.", "input": "Slurm", "output": "läuft"},
    ),
    "text": (
        {"_component_": f"{TORCHTUNE}.text_completion_dataset", "packed": True},
        {"text": "節點 👩‍👩‍👧 " * 30},
    ),
}


@pytest.fixture
def config_of(tmp_path, model_folder, dataset):
    def of(block: dict, rows: list[dict], tokenizer: dict | None = None) -> TrainConfig:
        path = write_config(tmp_path / "run", model_folder, dataset)
        content = read_yaml(path)
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = {"source": "json", "data_files": str(file), "split": "train"}
        content["dataset"] = block if "data_dir" in block else {**files, **block}
        tokenizer = tokenizer or {}
        kept = {} if "_component_" in tokenizer else content["tokenizer"]
        content["tokenizer"] = kept | tokenizer
        path.write_text(json.dumps(content))
        return load(path)

    return of


def assert_as_trained(config: TrainConfig, world: distributed.World) -> list[dict]:
    """Compare what is shown with the labels of the very batches; return what is shown."""
    (found,), faults = previews(config, 100)
    assert faults == []
    rows = batches.build(config, world).training.rows
    tokenizer = instantiate("tokenizer", config.tokenizer)
    assert (found["tokens"], found["samples"]) == (rows.samples.lengths.sum(), 2)
    assert found["trained_tokens"] == rows.samples.targets.sum()
    if config.dataset.get("packed"):
        assert found["rows"] == {
            "count": len(rows),
            "length": rows.length,
            "filled": rows.filled,
        }
    alone = batches.Rows(rows.samples, 0)
    assert len(found["shown"]) == len(alone)
    for sample, row in zip(found["shown"], alone, strict=True):
        batch = alone.collate([row])
        labels = batch.labels[batch.labels != IGNORE_INDEX].tolist()
        trained = "".join(span["text"] for span in sample["spans"] if span["trained"])
        wanted = tokenizer.decode(labels, skip_special_tokens=False)
        assert trained == wanted or "\ufffd" in wanted, "whole characters only"
        assert sample["trained_tokens"] == len(labels)
        assert "\ufffd" not in json.dumps(sample, ensure_ascii=False)
    return found["shown"]


@pytest.mark.parametrize("name", KINDS)
def test_what_is_shown_is_what_is_trained(name, config_of, world):
    """Whole, and cut at each of several tokens, some of them within a character."""
    block, row = KINDS[name]
    shown = assert_as_trained(config_of(block, [row, row], {"max_seq_len": 1024}), world)
    assert shown[0]["origin"].endswith("rows.jsonl, line 1")
    said = next(iter(row.values()))
    whole = "".join(span["text"] for span in shown[0]["spans"])
    assert (said if isinstance(said, str) else "👩‍👩‍👧<|end|>") in whole
    length = 34 if name == "text" else shown[0]["tokens"]
    for limit in range(length - 4, length - 1):
        assert_as_trained(config_of(block, [row, row], {"max_seq_len": limit}), world)


@pytest.mark.parametrize("form", ["messages", "text"])
def test_a_prepared_set_is_shown(form, config_of, tmp_path, world):
    folder = tmp_path / "prepared/mine/1/data/train"
    folder.mkdir(parents=True)
    row = {"messages": OPENAI} if form == "messages" else {"text": "Knoten"}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row, row]), folder / "part-0.parquet")
    (folder.parents[1] / "card.json").write_text(json.dumps({"format": form}))
    block = {"_component_": "trainer.data.prepared.prepared_dataset", "data_dir": str(folder)}
    (first, _) = assert_as_trained(config_of(block, []), world)
    expected = "節點 ist ein Knoten. 👩‍👩‍👧" if form == "messages" else "Knoten"
    assert first["spans"][-1] == {"trained": True, "text": f"{expected}<|end|>"}


def test_a_character_is_whole_where_its_training_begins_within(model_folder):
    """Without a begin token the first of three tokens of 節 is never predicted."""
    tokenizer = hugging_face_tokenizer(str(model_folder))
    tokens = tokenizer.encode("節點 ist")
    assert tokenizer.decode(tokens[:1]) == "\ufffd"
    trained = np.array([False, *[True] * (len(tokens) - 1)])
    assert spans(tokenizer, tokens, trained) == [{"trained": True, "text": "節點 ist"}]
    trained[3:] = False
    first, rest = spans(tokenizer, tokens, trained)
    assert first == {"trained": True, "text": "節"} and rest["text"] == "點 ist"


def test_every_fault_of_the_first_samples_is_named(config_of):
    block, row = KINDS["instruct"]
    rows = [row, {"q": "Warum?", "a": None}, row, {"q": None, "a": "Darum."}]
    (found,), faults = previews(config_of(block, rows), 1)
    assert [fault.rpartition("rows.jsonl, ")[2] for fault in faults] == [
        "line 2: there is no 'a'",
        "line 4: there is no 'q'",
    ]
    assert (found["read"], found["faulty"], len(found["shown"])) == (4, 2, 1)
    _, faults = previews(config_of(block, rows[1:2] * 30 + [row]), 1)
    assert len(faults) == 21
    assert faults[-1] == "dataset: 10 more of its first 31 samples cannot be tokenised"


def test_counts_are_of_the_first_thousand(config_of):
    """A sample without an answer is dropped, a longer one truncated."""
    block, _ = KINDS["openai"]
    question = {"messages": OPENAI[:1]}
    long = {"messages": [OPENAI[0], OPENAI[1] | {"content": "lang " * 100}]}
    rows = [question, long, *[{"messages": OPENAI}] * 1100]
    (found,), faults = previews(config_of(block, rows, {"max_seq_len": 128}), 2)
    assert faults == [] and (found["read"], found["samples"]) == (1000, 1102)
    assert (found["dropped"], found["truncated"]) == (1, 1) and found["left_out_tokens"] > 100
    assert [sample["trained_tokens"] > 0 for sample in found["shown"]] == [False, True]


def test_validation_samples_that_are_trained_are_counted(tmp_path, config_of):
    block, _ = KINDS["instruct"]
    rows = [{"q": f"Warum {number}?", "a": "Darum."} for number in range(40)]
    config = config_of(block, rows)
    # Another file, so that no split says it.
    file = tmp_path / "validation.jsonl"
    for overlap in (20, 19, 0):
        own = rows[20 : 20 + overlap]
        own += [row | {"a": "Wer weiß."} for row in rows[20 + overlap :]]
        file.write_text("".join(json.dumps(row) + "\n" for row in own))
        validation = {**config.dataset, "data_files": str(file)}
        both = dataclasses.replace(config, dataset_val=validation)
        (_, shown), faults = previews(both, 0)
        if overlap == len(own):
            assert [fault.partition(";")[0] for fault in faults] == [
                "dataset_val: each of its samples is in dataset too"
            ]
            continue
        assert faults == []
        noted = [note for note in shown["notes"] if "are in dataset, too" in note]
        words = f"{overlap} of its first 20 samples are in dataset, too, so that the validation "
        assert noted == ([f"{words}loss looks better than it is"] if overlap else [])
