"""trainer/imports.py: what ranks have imported when they are forked."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.trainer.runs import ROOT, write_config

SCRIPT = """
import json, pathlib, sys, torch
if sys.argv[2] == "gpu": torch.version.cuda = "13.0"
from trainer import imports
imports.prepare(pathlib.Path(sys.argv[1]))
print(json.dumps(sorted(sys.modules)))
"""


def imported(folder: Path, build: str, content: dict) -> set[str]:
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(content))
    argv = [sys.executable, "-c", SCRIPT, str(path), build]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("build", [pytest.param("cpu", marks=pytest.mark.long), "gpu"])
def test_models_are_imported_unless_that_would_start_cuda(build, tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    content = {
        "checkpointer": {"checkpoint_dir": str(tmp_path)},
        "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer"},
        "dataset": {"_component_": "mine.rows"},
    }
    (tmp_path / "mine.py").write_text("raise SystemExit('a package of the user')")
    found = imported(tmp_path, build, content)
    models = {"torchtune.models.llama3", "transformers.models.qwen3.modeling_qwen3", "torchao"}
    assert found & models == (models if build == "cpu" else set())
    assert {"transformers", "datasets", "trainer.storage.sharded"} <= found


@pytest.mark.long
def test_the_files_that_most_runs_need_are_those_of_a_rank():
    argv = [sys.executable, "-P", "-m", "trainer.imports"]
    done = subprocess.run(argv, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True)
    files = done.stdout.decode().splitlines()
    assert len(files) > 3000 and all(Path(file).is_absolute() for file in files)
    places = {Path(file).name.partition(".")[0]: number for number, file in enumerate(files)}
    # In the order of their use, and with what Python itself does not import.
    assert places["modeling_llama"] > places["loop"] and "libtorch_cpu" in places


RANK = """
import json, os, sys
from pathlib import Path
from trainer.config import instantiate, load
from trainer.data import tokenizers
from trainer.imports import prepare
from trainer.storage.weights import read_hf_config

path, folder = Path(sys.argv[1]), Path(sys.argv[2])
prepare(path)
opened = []
if os.fork() == 0:
    sys.addaudithook(lambda event, given: opened.append(given[0]) if event == "open" else None)
    if len(sys.argv) > 3:
        (folder / "config.json").write_text("{}")
        opened.clear()
    config = load(path)
    tokenizer = instantiate("tokenizer", config.tokenizer)
    tokenizers.faults(tokenizer, config.model_folder)
    has_model = "model_type" in read_hf_config(folder / "config.json")
    shared = {str(p) for p in opened if str(p).startswith((str(path), str(folder)))}
    print(json.dumps([sorted(shared), has_model]))
else:
    os.wait()
"""


@pytest.mark.long
def test_a_rank_opens_no_file_that_was_read_for_all(model_folder, dataset, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    path = write_config(tmp_path / "run", folder, dataset)

    def opened(*arguments: str) -> list:
        argv = [sys.executable, "-c", RANK, str(path), str(folder), *arguments]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    assert opened() == [[], True]
    # One that has changed meanwhile is read again.
    assert opened("changed") == [[str(folder / "config.json")], False]
