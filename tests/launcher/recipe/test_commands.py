"""Scripts and shell lines, from a file to a planned run."""

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

RESOURCES = {"nodes": 2, "gpus_per_node": 4, "time": "10"}


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
