"""--data and --model: the user's own files in any recipe."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from launcher import yamlfile
from launcher.errors import UsageFault
from launcher.recipe import load as recipes
from launcher.recipe import own_data
from runspec.keys.methods import METHODS

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
SHARE = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
HUB = "HuggingFaceH4/ultrachat_200k"


def written(path: Path, records: list[dict[str, Any]]) -> str:
    """The records as a file of the kind that its name says."""
    if path.suffix == ".csv":
        with path.open("w", encoding="utf-8-sig", newline="") as file:
            rows = csv.DictWriter(file, list(records[0]))
            rows.writeheader()
            rows.writerows(records)
    elif path.suffix == ".json":
        path.write_text(json.dumps(records))
    elif path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(records), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize("suffix", [".csv", ".json", ".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("record", "builder", "keys"),
    [
        (
            {"id": "1", "Question": "a", "answer": "b"},
            "instruct_dataset",
            {"column_map": {"input": "Question", "output": "answer"}},
        ),
        (
            {"instruction": "a", "input": "", "output": "b"},
            "alpaca_dataset",
            {"column_map": {"instruction": "instruction", "input": "input", "output": "output"}},
        ),
        ({"text": "a b c"}, "text_completion_dataset", {"column": "text"}),
        (
            {"messages": CHAT},
            "chat_dataset",
            {"conversation_column": "messages", "conversation_style": "openai"},
        ),
        (
            {"dialog": SHARE},
            "chat_dataset",
            {"conversation_column": "dialog", "conversation_style": "sharegpt"},
        ),
    ],
)
def test_the_format_is_found(tmp_path, suffix, record, builder, keys):
    if suffix == ".csv" and isinstance(next(iter(record.values())), list):
        return  # no cell of a CSV file is a list
    file = written(tmp_path / f"mine{suffix}", [record] * 3)
    found = own_data.read(file)
    assert found.block.items() >= {"data_files": file, "split": "train", **keys}.items()
    assert found.block["_component_"] == f"torchtune.datasets.{builder}"
    assert found.block["source"] == suffix.removeprefix(".").removesuffix("l")
    assert found.summary.endswith("; not used: id") == ("id" in record)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "has no record"),
        ('{"a": 1}\n{"a": \n', "line 2 is not JSON"),
        ('"a"\n', "line 1 is not a JSON object"),
        ('{"question": "M\xfcller", "answer": "b"}\n', "is not UTF-8 text: save it as UTF-8"),
        ('{"chosen": "a", "rejected": "b"}\n', "use a recipe with entry: dpo"),
        ('{"frage": "a", "antwort": "b"}\n', "column_map='{input: frage, output: antwort}'"),
    ],
)
def test_what_cannot_be_trained_is_refused(tmp_path, content, reason):
    file = tmp_path / "mine.jsonl"
    file.write_text(content, encoding="latin-1")
    with pytest.raises(UsageFault) as raised:
        own_data.read(str(file), pairs="")
    assert reason in str(raised.value) and str(file) in str(raised.value)


@pytest.mark.parametrize(
    ("entry", "record", "options", "words"),
    [
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": "c"}, (), "pairs of answers"),
        ("dpo", {"a": "b", "c": "d"}, ("{chosen: a, rejected: c}",), "pairs of answers"),
        ("kto", {"prompt": "a", "completion": "b", "label": True}, (), "answers with labels"),
        ("kto", {"chosen": "b", "rejected": "c"}, (), "pairs of answers"),
    ],
)
def test_a_method_reads_its_own_form(tmp_path, entry, record, options, words):
    file = written(tmp_path / "mine.jsonl", [record] * 3)
    overrides = tuple(f"dataset.column_map={text}" for text in options)
    recipe = recipes.load(f"llama8b_{entry}", overrides, data=file)
    assert words in recipe.inputs.notes[0]
    block = recipe.config["dataset"]
    assert block["_component_"] == METHODS[entry].pairs and block["data_files"] == file
    assert block["packed"] and block["drop_invalid"] is False
    remedy = "dataset.drop_invalid=True"
    recipe = recipes.load(f"llama8b_{entry}", (*overrides, remedy), data=file)
    assert recipe.config["dataset"]["drop_invalid"] is True
    with pytest.raises(UsageFault, match="needs chosen and rejected"):
        recipes.load(f"llama8b_{entry}", data=written(tmp_path / "text.jsonl", [{"text": "a"}]))


@pytest.mark.parametrize(
    ("record", "options", "column"),
    [
        ({"prompt": "Do roses need sun?", "plant": "roses"}, (), "prompt"),
        ({"Question": "Do roses need sun?", "answer": "yes"}, (), "Question"),
        ({"messages": [{"role": "user", "content": "Hm?"}], "id": "7"}, (), "messages"),
        ({"frage": "a?", "plant": "b"}, ("{prompt: frage}",), "frage"),
        ({"messages": [*CHAT]}, (), None),
        ({"frage": "a?", "plant": "b"}, (), "column_map='{prompt: frage}'"),
    ],
)
def test_prompts_are_known_to_the_method_that_answers_them(tmp_path, record, options, column):
    file = written(tmp_path / "mine.jsonl", [record] * 3)
    overrides = tuple(f"dataset.column_map={text}" for text in options)
    if column and "=" in column:
        with pytest.raises(UsageFault, match=re.escape(column)):
            recipes.load("qwen3_8b_grpo_lora", overrides, data=file)
        return
    block = recipes.load("qwen3_8b_grpo_lora", overrides, data=file).config["dataset"]
    assert block["data_files"] == file and not {"name", "new_system_prompt"} & block.keys()
    if column is None:
        assert block["_component_"] == "torchtune.datasets.chat_dataset"
    else:
        assert block["_component_"] == own_data.PROMPTS
        assert block["column_map"] == {"prompt": column}


def test_a_file_takes_the_place_of_the_recipes_dataset(tmp_path, monkeypatch):
    """Without the recipe's source, its split and its dataset of the hub, but packed as it is."""
    monkeypatch.chdir(tmp_path)
    file = written(tmp_path / "mine.csv", [{"question": "a", "answer": "b"}])
    recipe = recipes.load("llama8b_lora", data="mine.csv")
    block = recipe.config["dataset"]
    assert block["packed"] is True and block["data_files"] == file
    assert (block["source"], block["split"]) == ("csv", "train")
    assert "dataset" not in recipe.config["hub"] and recipe.config["hub"]["model"]
    assert "questions and answers (columns question and answer)" in recipe.notes[0]
    with pytest.raises(UsageFault, match="give --data FILE in its place"):
        recipes.load("llama8b_lora", ("dataset.data_files=mine.csv",))


def test_columns_with_other_names(tmp_path):
    file = written(tmp_path / "mine.csv", [{"frage": "a", "antwort": "b"}])
    columns = "dataset.column_map={input: frage, output: antwort}"
    recipe = recipes.load("llama8b_lora", (columns,), data=file)
    assert recipe.config["dataset"]["column_map"] == {"input": "frage", "output": "antwort"}
    with pytest.raises(UsageFault, match=r"column_map names reply, and .* has frage, antwort"):
        recipes.load("llama8b_lora", (columns.replace("antwort", "reply"),), data=file)


def test_a_semicolon_between_cells_is_recognised(tmp_path):
    (tmp_path / "mine.csv").write_text('question;answer\n"was, bitte?";ja, 1\n')
    block = recipes.load("llama8b_lora", data=str(tmp_path / "mine.csv")).config["dataset"]
    assert (block["sep"], block["column_map"]["output"]) == (";", "answer")


@pytest.mark.parametrize("name", ["llama8b_qlora", "qwen3_8b_lora", "demo"])
def test_a_model_takes_the_place_of_the_recipes_own(tmp_path, name):
    """The method and the length of rows stay; the class is the one that config.json names."""
    before = recipes.load(name)
    (tmp_path / "config.json").write_text("{}")
    mine = recipes.load(name, model=str(tmp_path))
    assert mine.method == before.method
    assert mine.config["model"]["_component_"] == "transformers"
    assert mine.config["checkpointer"]["checkpoint_dir"] == str(tmp_path)
    length = before.config["tokenizer"]["max_seq_len"]
    assert mine.config["tokenizer"]["max_seq_len"] == length
    assert "prepare" not in mine.config and "model" not in mine.config.get("hub", {})
    hub = recipes.load(name, model="Qwen/Qwen3-0.6B@main")
    assert hub.config["hub"]["model"] == "Qwen/Qwen3-0.6B@main"
    assert hub.config["checkpointer"]["checkpoint_dir"] == "${models_root}/Qwen3-0.6B"
    assert hub.given_name == f"{name} --model Qwen/Qwen3-0.6B@main"


def test_all_faults_of_data_and_model_come_at_once(tmp_path):
    with pytest.raises(UsageFault) as raised:
        recipes.load("llama8b_lora", ("epochs=none",), data="none.csv", model="none")
    faults = "\n".join(raised.value.faults)
    for part in ("none.csv: give an existing one", "--model none is no folder", "epochs"):
        assert part in faults
    with pytest.raises(UsageFault, match=r"--data and dataset.data_files= both name the data"):
        recipes.load("demo", ("dataset.data_files=a.csv",), data="b.csv")
    with pytest.raises(UsageFault, match=r"--data: own.yaml starts script:train.py"):
        script = tmp_path / "own.yaml"
        (tmp_path / "train.py").touch()
        script.write_text("entry: script:train.py\nresources: {nodes: 1}\n")
        recipes.load(str(script), data="none.csv")


def test_a_file_and_a_dataset_of_the_hub_exclude_each_other(tmp_path):
    file = written(tmp_path / "mine.jsonl", [{"messages": CHAT}])
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"extends: llama8b_lora\ndataset:\n  data_files: {file}\n")
    with pytest.raises(UsageFault) as raised:
        recipes.load(str(recipe))
    (fault,) = raised.value.faults
    assert f"names your file {file}, and dataset.source the hub's dataset {HUB}" in fault
    assert f"{recipe}, line 3" in fault
    recipes.load(str(recipe), ("dataset.source=json", "dataset.split=train"))
    # Files within a dataset of the hub are none of this machine.
    recipes.load("llama8b_lora", ("dataset.data_files=data/train-*.parquet",))


def test_validation_data_of_the_recipe_are_not_left_with_other_training_data(tmp_path):
    file = written(tmp_path / "mine.jsonl", [{"messages": CHAT}])
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("extends: llama8b_lora\ndataset_val: {split: test_sft}\n")
    with pytest.raises(UsageFault, match="the recipe's dataset_val is of its own dataset"):
        recipes.load(str(recipe), data=file)
    parts = ("dataset.split=train[:95%]", "dataset_val.split=train[95%:]")
    assert recipes.load(str(recipe), parts, data=file).config["dataset"]["source"] == "json"


@pytest.mark.parametrize(
    ("content", "entry"),
    [
        ("base_model: a/b\nsequence_len: 8\nadapter: lora\n", "axolotl:theirs.yaml"),
        ("model_name_or_path: a/b\nstage: sft\n", "llamafactory:theirs.yaml"),
        ("model_name_or_path: a/b\ndataset_name: c/d\npacking: true\n", "trl:sft"),
        ("checkpoint_dir: a/b\ntrain: {epochs: 1}\nlora_r: 4\n", "litgpt:finetune_lora"),
        (
            "model: {pretrained_model_name_or_path: a/b}\nstep_scheduler: {}\ndistributed: {}\n",
            "automodel:theirs.yaml",
        ),
    ],
)
def test_another_trainers_file_is_a_recipe_as_it_is(tmp_path, content, entry):
    file = tmp_path / "theirs.yaml"
    file.write_text(content)
    program = () if entry.endswith("yaml") else (f"entry={entry}",)
    recipe = recipes.load(str(file), ("+parameters.seed=3", *program), {"nodes": 2})
    assert recipe.entry_name == entry and recipe.resources.nodes == 2
    config = yamlfile.load(file)
    assert recipe.train_config(tmp_path, "/r").items() >= {**config, "seed": 3}.items()
    engine = entry.partition(":")[0]
    wrong = "litgpt" if engine == "trl" else "trl"
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"entry: {wrong}:theirs.yaml\nresources: {{nodes: 1}}\n")
    if engine != "llamafactory":  # what TRL reads, and more
        with pytest.raises(UsageFault, match=f"use entry: {engine}:theirs.yaml"):
            recipes.load(str(mine))


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("entry=orpo", "no entry of its own for ORPO: use entry: dpo with loss: orpo"),
        ("+container=my.sif", "use environment: with kind and image"),
        ("optimizer.Lr=1", "did you mean optimizer.lr?"),
    ],
)
def test_what_this_version_does_not_have_is_said_with_the_way_on(override, reason):
    with pytest.raises(UsageFault) as raised:
        recipes.load("demo", (override,))
    (fault,) = raised.value.faults
    assert reason in fault


def test_data_files_of_a_recipe_count_from_its_folder(tmp_path, monkeypatch):
    """A job runs elsewhere; what is not there stays as it is, such as a name on the hub."""
    file = written(tmp_path / "mine.jsonl", [{"question": "a", "answer": "b"}])
    (tmp_path / "sub").mkdir()
    for name, data in (("base", "mine.jsonl"), ("other", "absent.jsonl"), ("all", "*.jsonl")):
        (tmp_path / f"{name}.yaml").write_text(
            f"extends: demo\ndataset: {{data_files: '{data}'}}\n"
        )
    (tmp_path / "sub" / "mine.yaml").write_text("extends: ../base.yaml\n")
    monkeypatch.chdir(tmp_path / "sub")
    for name, wanted in (
        ("mine.yaml", file),
        ("../base.yaml", f"{tmp_path}/sub/../mine.jsonl"),
        ("../all.yaml", f"{tmp_path}/sub/../*.jsonl"),
        ("../other.yaml", "absent.jsonl"),
    ):
        assert recipes.load(name).config["dataset"]["data_files"] == wanted
