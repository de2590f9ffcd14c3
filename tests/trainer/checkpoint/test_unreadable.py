"""Files that cannot be read for now are read again, and never taken for missing ones."""

import os
import shutil
import subprocess
import sys

import pytest

from plugins.data.query_engines import base as query_engine
from plugins.serve import endpoint
from plugins.serve.launcher.endpoint import Endpoint
from runspec import files, weights
from tests.failing_storage import FailingStorage
from tests.trainer.runs import finish, start, write_config
from trainer.checkpoint import adapter
from trainer.checkpoint.weights import read_hf_config
from trainer.data.tokenizers import hugging_face_tokenizer


def test_a_first_read_that_fails_changes_nothing(tmp_path, model_folder, dataset, monkeypatch):
    """Each file of the model, the data, the run and its export can be read at the second try."""
    inputs = tmp_path / "inputs"
    shutil.copytree(model_folder, inputs / "model")
    shutil.copy(dataset, inputs / "qa.jsonl")
    # Of transformers: its config.json and its generation settings are read, too.
    changes = {"model": None, "max_steps": 1, "device": "cpu"}
    run = write_config(tmp_path / "run", inputs / "model", inputs / "qa.jsonl", **changes)
    storage = FailingStorage(tmp_path)
    for name, value in {**storage.env, "RUN_DIR": str(run.parent)}.items():
        monkeypatch.setenv(name, value)
    storage.fail("/inputs/|/train.yaml|/.tmp-export/config.json", once=True)
    said = finish(start(run, fresh=True))
    for name in ("train.yaml", "config.json", "tokenizer.json", ".tmp-export/config.json"):
        assert f"{name} cannot be read (Stale file handle): trying again for 120 s" in said
    settings = files.read_object(run.parent / "export" / "config.json")
    assert settings == files.read_object(model_folder / "config.json") | {"dtype": "float32"}


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("adapter_config.json", weights.base_of),
        ("adapter_config.json", weights.gives_scores),
        ("config.json", weights.gives_scores),
        ("config.json", lambda folder: read_hf_config(folder / "config.json")),
        ("model.safetensors.index.json", weights.parameter_count),
        ("tokenizer.json", lambda folder: hugging_face_tokenizer(str(folder))),
        (adapter.SETTINGS, lambda folder: adapter._settings(folder / adapter.SETTINGS)),
        (files.ENGINE, files.checkpoint_steps),
        (query_engine.DONE, query_engine.finished),
        (endpoint.GATEWAY, endpoint.gateway),
        (endpoint.ENDPOINT, lambda folder: Endpoint(folder).facts),
    ],
)
def test_what_cannot_be_read_is_not_missing(tmp_path, monkeypatch, name, read):
    monkeypatch.setenv("STORAGE_WAIT_S", "0")
    # A link to itself cannot be read by root either.
    os.symlink(name, tmp_path / name)
    with pytest.raises(OSError, match="symbolic links"):
        read(tmp_path)  # type: ignore[operator]


def test_a_table_is_cut_alike_when_the_storage_is_back(tmp_path):
    table, storage = tmp_path / "table.csv", FailingStorage(tmp_path)
    table.write_text("question;answer\na;00042\n")
    storage.fail("table.csv", once=True)
    code = "import pathlib, sys, runspec.tables as t; print(t.separator(pathlib.Path(sys.argv[1])))"
    command = [sys.executable, "-c", code, table]
    done = subprocess.run(
        command, env=os.environ | storage.env, check=True, capture_output=True, text=True
    )
    assert done.stdout == ";\n"
