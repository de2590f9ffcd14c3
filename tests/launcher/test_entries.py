"""An entry is one row of a table: a toy one is added here, and no file of the kit is touched."""

import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from launcher import check as checks
from launcher.check import preflight
from launcher.cli import cookbook
from launcher.do.submit import plan
from launcher.errors import RecipeFault, UsageFault
from launcher.recipe import entries
from launcher.recipe import load as recipes
from launcher.recipe.model import Entry
from launcher.site import Site
from launcher.slurm.executors import choose
from plugins.estimate.launcher import estimate as estimates
from runspec.keys.common import COMMON
from runspec.keys.key import REQUIRED, Key

STEPS = Key("steps", "positive", "How many steps the toy makes.", REQUIRED)
WORDS = Key("words", "hello | goodbye", "What it says.", "hello")
TOY = Entry(
    keys={**COMMON, "steps": STEPS, "words": WORDS},
    module="toys.train",
    resumes=True,
)


@pytest.fixture
def toy(monkeypatch, tmp_path) -> Path:
    """A recipe of the toy entry."""
    monkeypatch.setitem(entries.rows(), "toy", TOY)
    path = tmp_path / "mine.yaml"
    path.write_text("entry: toy\nsteps: 5\nresources: {nodes: 2, gpus_per_node: 1, time: '10'}\n")
    return path


def test_it_loads_renders_and_is_checked(toy, tmp_path):
    recipe = recipes.load(str(toy), ["words=goodbye"], {"nodes": 3})
    assert recipe.entry is TOY and recipe.method == "full" and recipe.max_retries == 3
    planned = plan(recipe, Site(shared_root=str(tmp_path / "shared")), choose(True))
    rank = 'bash "$COOKBOOK/slurm/rank.sh" python -P -m toys.train "$RUN_DIR/train.yaml"\n'
    assert "-P -m torch.distributed.run \\\n" in planned.script and rank in planned.script
    assert "#SBATCH --nodes=3\n" in planned.script and "MAX_RETRIES=3" in planned.script
    written = yaml.safe_load(planned.contents["train.yaml"])
    assert written == {"steps": 5, "words": "goodbye", "output_dir": str(planned.path)}
    context = checks.Context(recipe, planned.cluster, executor=choose(True))
    states = {each.subject: each.state for each in preflight.check(context)}
    assert set(states.values()) == {"ok", "skipped"} and states["layout"] == "ok"


def test_its_keys_are_checked_explained_and_overridden_as_all_are(toy):
    with pytest.raises(RecipeFault) as fault:
        recipes.load(str(toy), ["steps=0", "+wrods=hello", "batch_size=2", "words=hi"])
    told = "\n".join(fault.value.faults)
    assert "steps must be a whole number, 1 or more, got 0, in the override 'steps=0'" in told
    assert "unknown key 'wrods' (did you mean words?), in the override '+wrods=hello'" in told
    assert "unknown key 'batch_size', in the override" in told
    assert "words must be one of hello, goodbye, got 'hi'" in told
    shown = CliRunner().invoke(cookbook, ["recipes", "--key", "words"]).output
    assert "What it says." in shown and re.search(r"entries +toy\n", shown)


def test_what_it_cannot_is_refused(toy, tmp_path):
    recipe = recipes.load(str(toy))
    with pytest.raises(UsageFault, match="entry: toy cannot be estimated"):
        estimates.Estimate.of(recipe, tmp_path)
    with pytest.raises(UsageFault, match="--profile: toy does not support the kit's profiler"):
        recipe.profiled()


def test_without_its_row_it_is_not_known(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("steps: 5\nentry: toy\n")
    with pytest.raises(RecipeFault) as fault:
        recipes.load(str(path))
    (told,) = fault.value.faults
    assert told.startswith("entry 'toy' is not known")
    known = [f"{name}..." if name.endswith(":") else name for name in entries.rows()]
    assert f": it is one of {', '.join(known)} (" in told and "command, command:..." in told
    assert told.endswith(f"in {path}, line 2")
