"""cookbook start: from a data file and a model to a recipe, and to a trained model."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from launcher import paths
from launcher.cli import cookbook
from launcher.do import start as workflow
from launcher.do.start import _by_steps, _Settings
from launcher.errors import UsageFault
from launcher.recipe import load as recipes
from tests.launcher.kit import Kit

pytestmark = pytest.mark.usefixtures("fast_trainer")

QA = paths.REPO_ROOT / "configs/datasets/slurm_qa.jsonl"


@pytest.fixture
def faq(tmp_path: Path) -> Path:
    """A spreadsheet's export: a byte order mark, a column of no use, 60 rows."""
    rows = [json.loads(line) for line in QA.read_text().splitlines()[:60]]
    path = tmp_path / "my faq.csv"
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        table = csv.DictWriter(file, ["question", "answer", "id"])
        table.writeheader()
        table.writerows(row | {"id": number} for number, row in enumerate(rows))
    return path


def start(*arguments: str) -> Result:
    return CliRunner().invoke(cookbook, ["start", *arguments])


def test_a_table_becomes_a_recipe(faq: Path, model: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COOKBOOK_ROOT", str(tmp_path / "shared"))
    done = start(str(faq), str(model))
    assert done.exit_code == 0, done.output + repr(done.exception)
    assert "my faq.csv has questions and answers (columns question and answer)" in done.output
    assert "not used: id" in done.output
    assert "GiB per GPU on 1 x h100-80: fits; computed" in done.output
    assert f"--- dataset 1: {faq}, line 2: " in done.output and "[[" in done.output
    assert done.output.endswith("next:\n  cookbook submit my_faq.yaml --watch\n")
    recipe = recipes.load("my_faq.yaml")
    config = recipe.config
    assert recipe.method == "lora" and recipe.resources.world_size == 1
    assert config["tokenizer"]["max_seq_len"] == 512 and config["dataset"]["packed"] is False
    # 60 samples three times, two at a time.
    assert (config["epochs"], config["batch_size"]) == (3, 2)
    again = start(str(faq), str(model))
    assert "my_faq.yaml exists" in str(again.exception)


@pytest.mark.long
def test_prompts_become_a_recipe_with_a_reward_of_their_own(model: Path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COOKBOOK_ROOT", str(tmp_path / "shared"))
    row = {"prompt": "Do roses need sun?", "plant": "roses"}
    (tmp_path / "prompts.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    done = start("prompts.jsonl", str(model))
    assert done.exit_code == 0, done.output + repr(done.exception)
    assert "prompts (column prompt), and for the reward functions plant" in done.output
    assert f"# write {tmp_path / 'reward.py'}: def score(prompts, completions" in done.output
    # The reward and the recipe that docs/rl.md begins with.
    page = (paths.REPO_ROOT / "docs/rl.md").read_text()
    for name, kind in (("reward.py", "python"), ("my_roses.yaml", "yaml")):
        (tmp_path / name).write_text(re.findall(rf"```{kind}\n(.*?)```", page, re.S)[0])
    assert recipes.load("my_roses.yaml").config["rewards"]["mine"]["function"].endswith(":score")
    checked = CliRunner().invoke(cookbook, ["check", "prompts.yaml", "--local"])
    assert "no faults: submit would accept this run" in checked.output, checked.output


@pytest.mark.long
def test_a_table_of_hundreds_of_rows_is_split_for_validation(model: Path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COOKBOOK_ROOT", str(tmp_path / "shared"))
    done = start(str(QA), str(model))
    assert done.exit_code == 0, done.output + repr(done.exception)
    config = recipes.load("slurm_qa.yaml").config
    splits = config["dataset"]["split"], config["dataset_val"]["split"]
    assert splits == ("train[:95%]", "train[95%:]")
    checked = CliRunner().invoke(cookbook, ["check", "slurm_qa.yaml", "--local"])
    assert "no faults: submit would accept this run" in checked.output


def test_a_model_of_the_hub_is_downloaded_first(faq: Path, tmp_path: Path, monkeypatch):
    """Its memory is known from its published config.json; its tokenizer is not here yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COOKBOOK_ROOT", str(tmp_path / "shared"))
    done = start(str(faq), "Qwen/Qwen3-8B")
    assert done.exit_code == 0, done.output + repr(done.exception)
    needed = re.search(r"memory  ([\d.]+) of [\d.]+ GiB per GPU on .*: fits;", done.output)
    assert float(needed[1]) > 16 and "trained tokens are" not in done.output
    following = [line.split()[:2] for line in done.output.partition("; next:")[2].splitlines()[1:]]
    assert following == [["cookbook", verb] for verb in ("download", "check", "submit")]
    config = recipes.load("my_faq.yaml").config
    assert config["hub"] == {"model": "Qwen/Qwen3-8B", "dataset": None}
    assert config["checkpointer"]["checkpoint_dir"] == "${models_root}/Qwen3-8B"


def test_a_model_of_another_size_gets_another_layout(faq: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COOKBOOK_ROOT", str(tmp_path / "shared"))
    assert start(str(faq), "zai-org/GLM-4.5-Air").exit_code == 0
    recipe = recipes.load("my_faq.yaml")
    assert recipe.method == "lora" and recipe.resources.gpus_per_node > 1


@pytest.mark.parametrize(
    ("samples", "tokens", "packed", "epochs", "batch", "validates"),
    [
        (30, 40, False, 3, 1, False),
        (400, 100, False, 3, 8, True),
        (5000, 100, True, 3, 1, True),
        (100_000, 300, True, 1, 1, True),
    ],
)
def test_the_settings_follow_from_the_data(samples, tokens, packed, epochs, batch, validates):
    dataset = {"samples": samples, "read": 1000, "tokens": 1000 * tokens}
    found = _by_steps(_Settings(), dataset)
    assert (found.packed, found.epochs, found.batch) == (packed, epochs, batch)
    assert found.validates is validates


@pytest.mark.parametrize(
    ("data", "model", "reason"),
    [
        ("none.csv", "Qwen/Qwen3-8B", "none.csv: give an existing one"),
        ("my.docx", "Qwen/Qwen3-8B", "its name must end in one of"),
        ("my_axolotl.yaml", "Qwen/Qwen3-8B", "start it with cookbook submit my_axolotl.yaml"),
        ("here", "none", "--model none is no folder"),
    ],
)
def test_wrong_inputs_leave_no_file(faq, tmp_path, monkeypatch, data, model, reason):
    monkeypatch.chdir(tmp_path)
    done = start(str(faq) if data == "here" else data, model)
    assert isinstance(done.exception, UsageFault) and reason in str(done.exception)
    assert not list(tmp_path.glob("*.yaml"))


@pytest.mark.long
def test_rows_that_cannot_be_trained_are_named_before_the_next_step(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COOKBOOK_ROOT", str(tmp_path / "shared"))
    (tmp_path / "my.csv").write_text("question,answer\na,b\nc,\n")
    done = start("my.csv", str(model))
    assert done.exit_code == 1
    assert f"failed: dataset: {tmp_path / 'my.csv'}, line 3: there is no 'answer'" in done.output
    assert "fix these faults first" in done.output and (tmp_path / "my.yaml").is_file()


def test_names_of_data_become_names_of_recipes():
    assert workflow.default_file("/a/.my data (1).csv").name == "my_data__1_.yaml"
    assert workflow.default_file("prepared:support@train").name == "support.yaml"


@pytest.mark.long
def test_a_table_becomes_a_trained_model(user: Kit, faq: Path, model: Path, tmp_path: Path):
    """The two commands that README names, as typed."""
    recipe = str(tmp_path / "mine.yaml")
    begun = user.cookbook("start", str(faq), str(model), "-o", recipe)
    assert begun.returncode == 0, begun.stderr
    done = user.cookbook("submit", recipe, "--local", "--watch")
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (user.root / "runs").glob("*-mine-*")
    assert (run / "export/adapter/adapter_model.safetensors").is_file()
    assert "docs/runs.md, The exported model" in done.stdout
    for code in re.findall(
        r"```python\n(.*?)```", (paths.REPO_ROOT / "docs/runs.md").read_text(), re.S
    ):
        code = code.replace("runs/RUN", str(run)).replace("models/BASE", str(model))
        loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert loaded.returncode == 0, loaded.stderr
