"""Scripts, shell lines and workloads of air, from a file to a planned run."""

from pathlib import Path

import pytest
import yaml

from launcher.check import Context
from launcher.check.recipe import script
from launcher.do.submit import PlannedRun, plan
from launcher.errors import RecipeFault
from launcher.recipe import load as recipes
from launcher.recipe.entries import rows
from launcher.site import Site
from launcher.slurm import executors
from runspec import files

RESOURCES = {"nodes": 2, "gpus_per_node": 4, "time": "10"}
WORKLOAD = {
    "experiment_name": "my-training",
    "environment": {"version": "4", "dependencies": ["torch>=99", "PyYAML"]},
    "compute": {"num_accelerators": 16, "accelerator_type": "GPU_8xH100"},
    "code_source": {"type": "snapshot", "snapshot": {"root_path": "src"}},
    "env_variables": {"BATCH_SIZE": 32, "MLFLOW_TRACKING_URI": "http://tracking:5000"},
    "secrets": {"WANDB_API_KEY": "team/wandb"},
    "max_retries": 2,
    "timeout_minutes": 90,
    "parameters": {"lr": 1e-4},
    "command": 'torchrun --nproc_per_node="${LOCAL_WORLD_SIZE:-8}" train.py\necho done\n',
}


def planned(tmp_path: Path, content: dict, *overrides: str) -> PlannedRun:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    recipe = recipes.load(str(path), overrides)
    return plan(recipe, Site(shared_root=str(tmp_path)), executors.choose(True))


@pytest.mark.parametrize("entry", ["command", "command:echo $NODE_RANK"])
def test_shell_lines_run_once_per_node(tmp_path, entry):
    lines = {"command": "echo it's\necho $NODE_RANK\n"} if entry == "command" else {}
    made = planned(tmp_path, {"entry": entry, **lines, "resources": RESOURCES})
    assert "exec torchrun" not in made.script and "GPUS_PER_NODE=$RANKS_PER_NODE" in made.script
    assert 'rank.sh" bash -c ' in made.script and rows()["command"].per_node
    with pytest.raises(RecipeFault, match=r"needs the lines to run|are given twice"):
        broken = {} if lines else {"command": "x"}
        planned(tmp_path, {"entry": entry, **broken, "resources": RESOURCES})


def test_a_workload_of_air_is_a_recipe(tmp_path):
    (tmp_path / "src").mkdir()
    made = planned(tmp_path, WORKLOAD, "parameters.lr=2e-4")
    recipe = made.recipe
    assert (recipe.resources.nodes, recipe.resources.gpus_per_node) == (2, 8)
    assert recipe.code_root == tmp_path / "src" and recipe.max_retries == 2
    assert recipe.resources.time == "90"
    wanted = ("torch>=99", "PyYAML", "mlflow")
    assert recipe.environment and recipe.environment.dependencies == wanted
    met = {
        **WORKLOAD,
        "environment": {"dependencies": ["torch>=2", "PyYAML; python_version > '3'"]},
    }
    assert planned(tmp_path, met).recipe.environment is None, "the kit's own has them"
    assert recipe.secrets["WANDB_API_KEY"].parts[-2:] == ("team", "wandb")
    assert yaml.safe_load(made.contents[files.PARAMETERS]) == {"lr": 2e-4}
    for words in ("CODE_SOURCE_PATH=", "HYPERPARAMETERS_PATH=", "export MLFLOW_RUN_ID", "BATCH_SI"):
        assert words in made.script
    assert '"${LOCAL_WORLD_SIZE:-8}"' in made.script and " LOCAL_WORLD_SIZE=" in made.script


def test_what_a_workload_cannot_mean_here_is_refused_by_name(tmp_path):
    wrong = {
        **WORKLOAD,
        "usage_policy_id": "x",
        "max_retry": 1,
        "max_retries": "lots",
        "timeout_minutes": "two hours",
        "compute": {"num_accelerators": 12, "accelerator_type": "GPU_8xH100", "pool_id": "p"},
        "environment": {"dependencies": "requirements.yaml", "docker_image": "x"},
        "code_source": {"snapshot": {"root_path": "nowhere", "git": {"branch": "main"}}},
        "secrets": {"KEY": "noscope"},
    }
    with pytest.raises(RecipeFault, match="secrets must be a block"):
        planned(tmp_path, {**WORKLOAD, "secrets": ["KEY"]})
    with pytest.raises(RecipeFault) as raised:
        planned(tmp_path, wrong)
    told = "\n".join(raised.value.faults)
    for words in (
        "usage_policy_id: this key",
        "unknown key 'max_retry' (did you mean max_retries?)",
        "max_retries must be a whole number, 0 or more, got 'lots'",
        "timeout_minutes must be a whole number, 1 or more, got 'two hours'",
        "code_source.snapshot.root_path: nowhere is no folder",
        "multiple of 8",
        "compute.pool_id",
        "environment.dependencies must be a list",
        "environment.docker_image",
        "code_source.snapshot.git",
        "secrets.KEY must be scope/key",
    ):
        assert words in told


@pytest.mark.parametrize("key", ["command", "compute"])
def test_a_workload_that_lacks_a_key_is_named_as_such(tmp_path, key):
    lacking = {name: value for name, value in WORKLOAD.items() if name != key}
    (tmp_path / "src").mkdir()
    with pytest.raises(RecipeFault) as caught:
        planned(tmp_path, lacking)
    (fault,) = caught.value.faults
    assert fault.startswith(f"{key} is missing")


def test_what_a_script_imports_is_looked_for_in_its_environment(tmp_path):
    (tmp_path / "train.py").write_text("import notthere\n")
    content = {"entry": "script:train.py", "resources": RESOURCES}

    def faults(environment):
        made = planned(tmp_path, {**content, "environment": environment}).recipe
        context = Context(made, Site(shared_root=str(tmp_path)), executor=executors.choose(True))
        return [each.message for each in script(context) if each.state == "failed"]

    assert faults({"dependencies": ["notthere"]}) == [], "it is not built yet"
    packages = tmp_path / "venv/lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    python = {"python": str(tmp_path / "venv/bin/python")}
    assert faults(python) == [f"train.py imports notthere, which {tmp_path}/venv lacks"]
    (tmp_path / "more/notthere").mkdir(parents=True)
    (packages / "more.pth").write_text(f"{tmp_path}/more\n")
    assert faults(python) == []
