"""The examples made from known guides: at real size as text and sizes, at a tiny size to the end.

python -m pytest -n 0 -m named tests/launcher/do/test_guides.py
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from launcher import paths
from launcher.recipe import entries, sweep
from launcher.recipe import load as recipes
from plugins.estimate.launcher.memory import StepMemory
from plugins.estimate.launcher.recipe_step import step_of
from plugins.estimate.launcher.step_config import GIB
from tests.launcher.do.test_examples import ended
from tests.launcher.kit import Kit, losses

LITGPT = paths.REPO_ROOT / "examples" / "large_models" / "litgpt.yaml"
SQUAD = paths.REPO_ROOT / "examples" / "automodel_squad" / "squad.yaml"
# Of an h100-80.
USABLE_GIB = 73.1


@pytest.mark.parametrize("name", ["llama3_1/70B_full", "llama3_1/70B_lora"])
def test_torchtunes_configs_of_70b_are_recipes_as_they_are(name: str):
    """On 2 x 8 they are the kit's trainer's, also with a model that --model names, and fit."""
    given = {"nodes": 2, "gpus_per_node": 8}
    stock = recipes.load(name, ["tokenizer.max_seq_len=4096"], given)
    assert stock.config["entry"] == "sft"
    step = step_of(stock.resolved(paths.REPO_ROOT, "run"), 2, 8)
    assert StepMemory(step).peak / GIB < USABLE_GIB
    own = recipes.load(name, [], given, model="meta-llama/Llama-3.1-70B-Instruct")
    assert own.config["entry"] == "sft" and own.config["model"]["_component_"] == "transformers"


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 1), (1, 4), (2, 4)])
def test_squad_is_a_recipe_of_automodel_and_of_the_kit(nodes, ranks):
    given = {"nodes": nodes, "gpus_per_node": ranks}
    itself = recipes.load(str(SQUAD), [], given)
    theirs = itself.config["parameters"]
    assert itself.config["entry"].startswith("automodel:")
    assert theirs["checkpoint"]["staging_dir"] == "/tmp/squad"
    micro_steps = 8 // (nodes * ranks)
    kit = recipes.load(
        str(SQUAD.with_name("kit.yaml")), [f"gradient_accumulation_steps={micro_steps}"], given
    )
    whole = kit.config["batch_size"] * micro_steps * kit.resources.world_size
    assert whole == theirs["step_scheduler"]["global_batch_size"]
    assert kit.config["optimizer"].items() >= {"lr": 1e-5, "betas": [0.9, 0.999]}.items()


def test_the_keys_beside_those_of_other_trainers_are_the_kits():
    page = (paths.REPO_ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
    rows = page.partition("<!-- keys -->")[2].partition("<!-- end of keys -->")[0].splitlines()
    cells = [row.split(" | ")[1] for row in rows if row.startswith("| ") and " | " in row]
    named = re.findall(r"`([a-z_]+(?:\.[a-z_]+)*)(?:: \w+|: \[[a-z, ]+\])?`", " ".join(cells))
    named = [name.replace("dataset_val.", "dataset.") for name in named]
    said = {"extends", "optimizer._component_", "lr_scheduler._component_"}
    assert said < set(named) and set(named) - said <= entries.all_keys().keys()


def test_the_course_has_a_sweep_of_litgpts_own():
    litgpt = sweep.load(str(LITGPT))
    assert len(litgpt.cells) == 9
    for cell in litgpt.cells:
        made = recipes.load(litgpt.recipe, cell.overrides)
        assert made.config["entry"] == "litgpt:finetune_full"


EXAMPLES = sorted(paths.REPO_ROOT.glob("examples/*/run.sh"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.parent.name)
def test_an_example_begins_nothing_when_an_argument_is_wrong(script: Path):
    argv = ["/bin/bash", str(script), "--locale"]
    done = subprocess.run(argv, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert done.returncode == 2 and "--locale" in done.stderr and not done.stdout, done


def test_a_step_of_support_intents_names_the_one_that_it_needs(tmp_path):
    script = next(each for each in EXAMPLES if each.parent.name == "support_intents")
    env = {"PATH": "/usr/bin:/bin", "COOKBOOK_ROOT": str(tmp_path)}
    argv = ["/bin/bash", str(script), "--local", "eval"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert done.returncode == 1, done
    assert done.stderr.endswith(f"support-lora.run is missing: bash {script} train --local\n")


@pytest.mark.named
def test_every_experiment_of_the_course_has_a_state_and_a_prediction(user: Kit):
    printed = ended(user, "large_models")
    assert "PREDICTED GiB" in printed and "RSS GiB" in printed
    root = user.root / "large_models"
    results = json.loads((root / "results.json").read_text())
    state = {row["cell"]: row["state"] for row in results}
    cells = [cell for name in ("one_gpu", "four_gpus") for cell in sweep.load(name).cells]
    assert len(state) == len(cells), printed
    too_large = {name for name, each in state.items() if each == "OUT_OF_MEMORY"}
    assert "13B, bf16, batch 1, AdamW" in too_large, state
    assert "13B, bf16, batch 1, SGD" not in too_large and "7B, QLoRA, batch 4 x 4" not in too_large
    assert set(state.values()) == {"COMPLETED", "OUT_OF_MEMORY"}, state


@pytest.mark.named
def test_squad_has_the_same_losses_on_every_layout(user: Kit):
    printed = ended(user, "automodel_squad")
    largest = re.findall(r"largest difference from one_gpu: (\w+) (\S+)", printed)
    # With AUTOMODEL_PYTHON, as the README has it, Automodel's own parts are the fourth.
    columns = ["one_gpu", "four_gpus", "two_nodes"]
    columns += ["automodel"] if os.environ.get("AUTOMODEL_PYTHON") else []
    assert [name for name, _ in largest] == columns
    assert all(float(difference) < 1e-3 for _, difference in largest), largest
    run = losses(user.root / "squad" / "run-one_gpu")
    assert run[max(run)] < run[1] - 1
    saved = list((user.root / "squad" / "run-two_nodes" / "checkpoints").glob("step_*/COMPLETE"))
    assert saved, "asynchronous checkpoints are complete"


@pytest.mark.named
def test_from_a_bare_model_to_answers(slurm_user: Kit):
    printed = ended(slurm_user, "torchtune_70b", local=False)
    for words in ("NODELIST(REASON)", "guide-full", "COMPLETED", "slowest", "in Python"):
        assert words in printed
    answer = printed.partition("== the merged model answers")[2].strip().splitlines()[-1]
    assert "shares a cluster" in answer, answer
