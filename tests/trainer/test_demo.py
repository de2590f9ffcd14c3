"""The demo's model and tokenizer, and the way from a trained run to an answer."""

import json
from pathlib import Path

import pytest

from tests.trainer.forks import run
from tests.trainer.runs import ROOT, progress, train, write_config
from trainer import demo
from trainer.errors import ConfigError

DATASET = ROOT / "configs/datasets/slurm_qa.jsonl"


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_same_seed_gives_the_same_bytes(tmp_path):
    run("trainer.demo", tmp_path / "one", "--dataset", DATASET).check_returncode()
    demo.make(tmp_path / "two", DATASET, seed=0)
    demo.make(tmp_path / "three", DATASET, seed=1)
    one, two, three = (content(tmp_path / name) for name in ("one", "two", "three"))
    assert one == two
    assert one["model.safetensors"] != three["model.safetensors"]
    assert one["tokenizer.json"] == three["tokenizer.json"]
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two", "three"}


@pytest.mark.parametrize("text", [None, "", "{", '{"question": 1}\n'])
def test_unusable_dataset_leaves_no_folder(text, tmp_path):
    dataset = tmp_path / "data.jsonl"
    if text is not None:
        dataset.write_text(text)
    with pytest.raises(ConfigError, match="--dataset"):
        demo.make(tmp_path / "model", dataset)
    assert not (tmp_path / "model").exists()


def test_an_exported_model_answers(tmp_path, model_folder):
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
    )
    train(path)
    assert progress(tmp_path / "run")["state"] == "finished"

    folder = tmp_path / "run/export"
    asked = run("trainer.generate", folder, rows[1]["question"])
    assert asked.returncode == 0 and asked.stdout == rows[1]["answer"] + "\n"
    assert asked.stderr == ""
    missing = run("trainer.generate", tmp_path / "nothing", "a")
    assert missing.returncode == 1
    assert missing.stderr.startswith("error: ") and missing.stderr.count("\n") == 1
