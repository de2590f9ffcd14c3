"""That nothing imports torchtune, and what a rank does not import."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.trainer.runs import ROOT, write_config


def imported(path: Path) -> set[str]:
    """The modules that a file imports anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def test_nothing_imports_torchtune_and_only_fp8_torchao():
    for path in (ROOT / "trainer").rglob("*.py"):
        tops = {name.split(".")[0] for name in imported(path)}
        assert "torchtune" not in tops, path
        assert path.name == "fp8.py" or "torchao" not in tops, path


def run(code: str, *arguments: str) -> subprocess.CompletedProcess:
    argv = [sys.executable, "-c", code, *arguments]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)


def test_models_are_imported_without_a_word():
    """transformers imports torchao, which tells of kernels that it cannot load."""
    done = run("from trainer.models.transformers import source")
    assert done.stdout == done.stderr == ""


def test_checking_a_config_needs_no_torch():
    code = "import sys, trainer.config; print([m for m in sys.modules if m.startswith('torch')])"
    assert run(code).stdout == "[]\n"


# The modules of a rank once the optimizer has stepped after the first loss.
FIRST_STEP = """
import os, sys
from pathlib import Path
from torch.optim.optimizer import register_optimizer_step_post_hook
from trainer import start
from trainer.methods.sft import SupervisedFineTuning
def report(*_):
    print(*sys.modules, flush=True)
    os._exit(0)
class FirstStep(SupervisedFineTuning):
    def loss(self, models, batch):
        register_optimizer_step_post_hook(report)
        return super().loss(models, batch)
sys.exit(start.main(Path(sys.argv[1]), FirstStep))
"""


@pytest.mark.long
def test_a_rank_imports_little_once_its_data_are_tokenised(tmp_path, model_folder):
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    data = tmp_path / "data.jsonl"
    data.write_text(f"{json.dumps({'messages': turns})}\n" * 20)
    block = {"_component_": "trainer.data.conversations.conversation_dataset", "source": "json"}
    block |= {"data_files": str(data), "split": "train", "packed": True}
    path = write_config(tmp_path / "run", model_folder, data, row_length=64)
    changes = {"model": {"lora_rank": 4, "lora_alpha": 8}, "dataset": block}
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changes))
    first, second = (run(FIRST_STEP, str(path)).stdout.splitlines()[-1] for _ in range(2))
    heavy = {"torchtune", "datasets", "pandas", "omegaconf", "tensorboard"}
    # The first one tokenises the data.
    assert "datasets" in first.split() and not heavy & set(second.split())
