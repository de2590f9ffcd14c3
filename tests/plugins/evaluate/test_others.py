"""Tasks of lm-evaluation-harness on local files."""

import json
from pathlib import Path

import pytest
import torch

from plugins.evaluate import main as evaluate
from plugins.evaluate.model import Answerer

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
