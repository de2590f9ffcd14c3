"""Evaluations: the same table from 1 and from 4 workers, after a kill, and as transformers says."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from plugins.evaluate import main as evaluate
from plugins.evaluate import model as models
from plugins.evaluate import samples
from runspec.weights import content_sha256
from trainer.errors import ConfigError

SUITE = {
    "dtype": "fp32",
    "device": "cpu",
    "batch_size": 4,
    "shard_samples": 8,
    "max_new_tokens": 4,
    "resamples": 200,
    "tasks": {
        "likelihood": {"kind": "perplexity"},
        "answers": {"kind": "generation", "metrics": ["exact_match", "f1"], "group": "topic"},
    },
}


def text_of(file: Path) -> dict:
    """A dataset block of a file of JSON lines."""
    text = "torchtune.datasets.text_completion_dataset"
    return {"_component_": text, "source": "json", "data_files": str(file), "split": "train"}


@pytest.fixture(scope="module")
def other_model(tmp_path_factory, dataset) -> Path:
    from trainer import demo

    folder = tmp_path_factory.mktemp("other") / "model"
    demo.make(folder, Path("configs/datasets/slurm_qa.jsonl"), seed=1)
    return folder


@pytest.fixture(scope="module")
def suite(model_folder, other_model, dataset, tmp_path_factory) -> dict:
    rows = [json.loads(line) for line in dataset.read_text().splitlines()]
    data = tmp_path_factory.mktemp("suite") / "data.jsonl"
    lines = ({**row, "topic": row["question"].split()[2]} for row in rows)
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tasks = {name: {**task, "data": str(data)} for name, task in SUITE["tasks"].items()}
    models = {"candidate": str(model_folder), "against": str(other_model)}
    return {**SUITE, **models, "training_data": text_of(dataset), "tasks": tasks}


def start(folder: Path, suite: dict, ranks: list[int], world: int) -> dict | None:
    """Run ranks of an evaluation one after another; return the result once rank 0 has run."""
    folder.mkdir(exist_ok=True)
    (folder / "train.yaml").write_text(json.dumps(suite))
    for rank in ranks:
        evaluate.run(evaluate.load(folder / "train.yaml"), folder, rank, world, 0)
    found = folder / "evals" / "suite.json"
    return json.loads(found.read_text()) if found.exists() else None


@pytest.fixture(scope="module")
def alone(tmp_path_factory, suite) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("alone")
    result = start(folder, suite, [0], 1)
    assert result is not None
    return folder, result


@pytest.mark.parametrize("spread", [False, True])
def test_four_workers_give_the_table_of_one(tmp_path, suite, alone, spread, monkeypatch):
    """A model that is larger than a GPU is answered by the first rank of each of two nodes."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(evaluate.loading, "is_larger_than_a_gpu", lambda *_: spread)
    assert start(tmp_path, suite, [1, 2, 3, 0], 4)["tasks"] == alone[1]["tasks"]
    progress = json.loads((tmp_path / "progress.json").read_text())
    assert progress["state"] == "finished" and progress["step"] == 4 * 44


def test_a_result_says_what_was_evaluated(alone, suite, tmp_path):
    result = alone[1]
    copy = shutil.copytree(suite["candidate"], tmp_path / "copy")
    assert result["candidate"]["weights_sha256"] == content_sha256(copy)
    weights = next(copy.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert result["candidate"]["weights_sha256"] != content_sha256(copy)
    tasks = result["tasks"]
    assert tasks["answers"]["data_sha256"] == tasks["likelihood"]["data_sha256"]
    rows = Path(suite["tasks"]["answers"]["data"]).read_text().splitlines()
    (tmp_path / "fewer.jsonl").write_text("\n".join(rows[:-1]))
    fewer = samples.read("answers", {"data": str(tmp_path / "fewer.jsonl")})
    assert samples.sha256(fewer) != tasks["answers"]["data_sha256"]


def test_a_model_that_changes_meanwhile_is_refused(alone, suite, tmp_path):
    from plugins.evaluate import result
    from plugins.evaluate.shards import Plan

    shutil.copytree(alone[0] / "evals" / "shards", tmp_path / "evals" / "shards")
    copy = shutil.copytree(suite["candidate"], tmp_path / "copy")
    (tmp_path / "train.yaml").write_text(json.dumps({**suite, "candidate": str(copy)}))
    config = evaluate.load(tmp_path / "train.yaml")
    plan = Plan(config, tmp_path)
    (copy / "config.json").touch()
    with pytest.raises(ConfigError, match="changed while it was evaluated"):
        result.write(plan, config, tmp_path)


def test_a_start_after_a_kill_makes_only_what_is_missing(suite, alone):
    folder, before = alone
    shards = sorted((folder / "evals" / "shards").glob("*.json"))
    times = {path: path.stat().st_mtime_ns for path in shards}
    shards[0].unlink()
    shards[5].write_text('{"mark": "torn"')
    assert start(folder, suite, [0], 1)["tasks"] == before["tasks"]
    made = {path for path in shards if path.stat().st_mtime_ns != times[path]}
    assert made == {shards[0], shards[5]}


def test_other_settings_are_answered_anew(tmp_path, suite, alone):
    folder, _ = alone
    shard = next((folder / "evals" / "shards").glob("answers--candidate--*0.json"))
    (tmp_path / "evals" / "shards").mkdir(parents=True)
    (tmp_path / "evals" / "shards" / shard.name).write_text(shard.read_text())
    from plugins.evaluate.shards import Plan

    loaded = evaluate.load(folder / "train.yaml")
    assert shard.name not in [each.file for each in Plan(loaded, tmp_path).missing()]
    changed = {**loaded, "max_new_tokens": 5}
    assert shard.name in [each.file for each in Plan(changed, tmp_path).missing()]


def test_all_lines_that_cannot_be_asked_are_told_at_once(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "a"}\nnot json\n{"question": "b", "answer": "c"}\n')
    with pytest.raises(ConfigError) as error:
        samples.read("answers", {"kind": "generation", "data": str(data)})
    first, second = error.value.faults
    assert "line 1: it has no 'answer'" in first and "line 2" in second


def test_a_stop_file_ends_it_and_keeps_what_is_answered(tmp_path, suite):
    (tmp_path / ".stop").touch()
    assert start(tmp_path, suite, [0], 1) is None
    assert json.loads((tmp_path / "progress.json").read_text())["state"] == "stopped"


def test_the_perplexity_is_that_of_transformers_own_loss(alone, suite, model_folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    total, count = 0.0, 0
    for line in Path(suite["tasks"]["likelihood"]["data"]).read_text().splitlines():
        row = json.loads(line)
        turns = [{"role": "user", "content": row["question"]}]
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        whole = tokenizer(text + row["answer"] + "<|end|>", add_special_tokens=False)["input_ids"]
        ids = torch.tensor([whole])
        labels = ids.clone()
        labels[0, : len(prompt)] = -100
        with torch.no_grad():
            loss = model(input_ids=ids, labels=labels).loss
        total += float(loss) * (len(whole) - len(prompt))
        count += len(whole) - len(prompt)
    figures = alone[1]["tasks"]["likelihood"]["metrics"]["perplexity"]["all"]
    assert figures["candidate"]["value"] == pytest.approx(math.exp(total / count), rel=1e-4)


def test_groups_and_contamination_are_counted(alone):
    answers = alone[1]["tasks"]["answers"]
    groups = answers["metrics"]["f1"]
    assert sum(each["samples"] for name, each in groups.items() if name != "all") == 44
    assert answers["contamination"]["exact"] == 44
    assert answers["differing"]["count"] <= 44
    assert {"value", "low", "high", "p", "test"} <= groups["all"]["difference"].keys()


def test_contamination_sees_thirteen_words_in_a_row(tmp_path):
    words = " ".join(f"w{k}" for k in range(20))
    training = tmp_path / "training.jsonl"
    training.write_text(json.dumps({"text": f"before {words} after"}) + "\n")
    given = [
        samples.Sample(0, f"asks {words}", "x", ""),
        samples.Sample(1, " ".join(words.split()[:12]), "x", ""),
    ]
    found = samples.contamination(given, text_of(training))
    assert (found["exact"], found["overlap_13_words"]) == (0, 1)


def test_a_prompt_that_leaves_no_room_is_counted_and_not_cut(model_folder):
    settings = {**evaluate.load_defaults(), "max_new_tokens": 8, "dtype": "fp32"}
    answerer = models.Answerer(model_folder, settings, torch.device("cpu"))
    given = [samples.Sample(0, "word " * 900, "x", ""), samples.Sample(1, "short", "x", "")]
    long, short = answerer.answers(given, {})
    assert long["too_long"] and not long["answer"] and "too_long" not in short
