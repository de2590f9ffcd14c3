"""Tasks that others answer: lm-evaluation-harness on local files, a judge that the kit serves."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from plugins.evaluate import main as evaluate
from plugins.evaluate.model import Answerer
from plugins.serve import endpoint as endpoints
from plugins.serve.journal import read
from tests.launcher.kit import until

HARNESS = """
task: slurm_yes_no
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}\\nAnswer:"
doc_to_choice: ["yes", "no"]
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc}}]
"""
SETTINGS = {"dtype": "fp32", "device": "cpu", "batch_size": 4, "resamples": 100, "template": "chat"}


def evaluated(folder: Path, tasks: dict, **more: str) -> dict:
    folder.mkdir()
    config = {**SETTINGS, "max_new_tokens": 4, "tasks": tasks, **more}
    (folder / "train.yaml").write_text(json.dumps(config))
    evaluate.run(evaluate.load(folder / "train.yaml"), folder, 0, 1, 0)
    return json.loads((folder / "evals" / "suite.json").read_text())["tasks"]


# Importing the harness takes half a minute on a busy machine.
@pytest.mark.named
def test_a_harness_task_of_ones_own_is_taken_as_it_is(tmp_path, model_folder):
    pytest.importorskip("lm_eval", reason="it comes with --with lm-eval")
    data, place = tmp_path / "yes_no.jsonl", tmp_path / "tasks"
    rows = [{"question": f"Is {k} even?", "label": k % 2} for k in range(12)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    place.mkdir()
    (place / "slurm_yes_no.yaml").write_text(HARNESS.format(data=data))
    task = {"kind": "lm_eval", "tasks": ["slurm_yes_no"], "include_path": str(place)}
    found = evaluated(tmp_path / "run", {"harness": task}, candidate=str(model_folder))
    groups = found["harness"]["metrics"]["slurm_yes_no/acc"]["all"]
    figures = groups["candidate"]
    # What the harness computes, by hand: the choice whose tokens are likelier after the question.
    config = {**evaluate.load_defaults(), **SETTINGS, "template": "none"}
    answerer = Answerer(model_folder, config, torch.device("cpu"))
    right = 0
    for row in rows:
        likely = []
        for choice in ("yes", "no"):
            before = answerer.tokenizer(f"{row['question']}\nAnswer:")["input_ids"]
            whole = answerer.tokenizer(f"{row['question']}\nAnswer: {choice}")["input_ids"]
            with torch.inference_mode():
                logits = answerer.model(torch.tensor([whole])).logits[0].log_softmax(-1)
            places = range(len(before) - 1, len(whole) - 1)
            likely.append(float(sum(logits[k, whole[k + 1]] for k in places)))
        right += (likely[1] > likely[0]) == bool(row["label"])
    assert figures["value"] == pytest.approx(right / 12)
    wide = 1.96 * figures["stderr"]
    assert groups["samples"] == 12
    assert figures["high"] - figures["low"] == pytest.approx(2 * wide, rel=1e-3)
    assert found["harness"]["samples"] == 12 and len(found["harness"]["data_sha256"]) == 64


@pytest.fixture
def judge(tmp_path, model_folder):
    """The kit's own server with a tiny model: its address, and the endpoint's folder."""
    folder, run = tmp_path / "judge", tmp_path / "serving"
    run.mkdir()
    folder.mkdir()
    (folder / "key").write_text("judges-key\n")
    (folder / "key").chmod(0o600)
    config = {"endpoint": "judge", "endpoint_dir": str(folder), "model": str(model_folder)}
    config |= {"key_file": str(folder / "key"), "device": "cpu", "dtype": "float32"}
    (run / "train.yaml").write_text(json.dumps(config))
    argv = [sys.executable, "-m", "plugins.serve.server", str(run / "train.yaml")]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    try:
        until(lambda: "ready" in [each["state"] for each in endpoints.servers(folder)], 120)
        yield endpoints.servers(folder)[0]["url"], folder
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


@pytest.mark.long
def test_a_judge_that_the_kit_serves_is_asked_twice_with_the_answers_exchanged(
    tmp_path, model_folder, judge
):
    url, folder = judge
    data = tmp_path / "data.jsonl"
    rows = [{"question": f"What is job {k}?", "answer": "a job"} for k in range(3)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"kind": "judge", "data": str(data), "judge_url": f"{url}/v1", "judge_model": "judge"}
    task |= {"judge_key_file": str(folder / "key")}
    models = {"candidate": str(model_folder), "against": str(model_folder)}
    found = evaluated(tmp_path / "run", {"wins": task}, **models)["wins"]
    figures = found["metrics"]["win_rate"]["all"]
    assert figures["wins"] + figures["losses"] + figures["ties"] == 3
    # Both answers are the same, so whatever the judge says, it contradicts itself or says a tie.
    assert figures["candidate"]["value"] == 0.5 and figures["p"] == 1
    asked = list(read(folder / endpoints.REQUESTS))
    assert len(asked) == 6 and {row["status"] for row in asked} == {200}
    assert all("Reply with one letter" in row["messages"] for row in asked)
    (folder / "wrong").write_text("no-key")
    task["judge_key_file"] = str(folder / "wrong")
    with pytest.raises(Exception, match="401 Unauthorized: check judge_url and its key"):
        evaluated(tmp_path / "again", {"wins": task}, **models)
