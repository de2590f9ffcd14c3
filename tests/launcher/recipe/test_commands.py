"""Scripts and shell lines, from a file to a planned run."""

import sys
from pathlib import Path

import pytest
import yaml

from launcher.check import Context
from launcher.check.inside import inside
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
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "train.py").write_text("import json, mine, notthere.part\n")
    content = {"entry": "script:train.py", "resources": RESOURCES}

    def faults(environment):
        made = planned(tmp_path, {**content, "environment": environment}).recipe
        context = Context(made, Site(shared_root=str(tmp_path)), executor=executors.choose(True))
        return [each.line for each in inside(context) if each.state == "failed"]

    (fault,) = faults({"python": sys.executable})
    assert " has no notthere: install it there" in fault
    (fault,) = faults(None)
    assert "lacks notthere, which this recipe needs: add notthere to environment.dep" in fault
    assert fault.endswith(f"; put what is your own into {tmp_path}")
