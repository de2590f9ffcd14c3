"""An entry is one row of a table: a toy one is added here, and no file of the kit is touched.

The keys: their page, their kinds, and which may change when a run resumes.
"""

from pathlib import Path

import pytest
import yaml

from benchmarks.reference import keys
from launcher import check as checks
from launcher import paths
from launcher.check import preflight
from launcher.do.submit import plan
from launcher.errors import RecipeFault, UsageFault
from launcher.recipe import entries
from launcher.recipe import load as recipes
from launcher.recipe.entries import all_keys
from launcher.recipe.model import Entry
from launcher.site import Site
from launcher.slurm.executors import choose
from plugins.estimate.launcher import estimate as estimates
from runspec.keys.common import COMMON
from runspec.keys.key import KINDS, REQUIRED, Key, may_change

STEPS = Key("steps", "positive", "How many steps the toy makes.", REQUIRED)
WORDS = Key("words", "hello | goodbye", "What it says.", "hello")
TOY = Entry(keys={**COMMON, "steps": STEPS, "words": WORDS}, module="toys.train", resumes=True)


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


def test_its_keys_are_checked_and_overridden_as_all_are(toy):
    with pytest.raises(RecipeFault) as fault:
        recipes.load(str(toy), ["steps=0", "+wrods=hello", "batch_size=2", "words=hi"])
    told = "\n".join(fault.value.faults)
    assert "steps must be a whole number, 1 or more, got 0, in the override 'steps=0'" in told
    assert "unknown key 'wrods' (did you mean words?), in the override '+wrods=hello'" in told
    assert "unknown key 'batch_size', in the override" in told
    assert "words must be one of hello, goodbye, got 'hi'" in told


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


# The keys of all entries ---------------------------------------------------------------------


def test_the_page_of_keys_is_what_the_table_says():
    page = (paths.REPO_ROOT / "docs" / "keys.md").read_text()
    assert page == keys(), "python -m benchmarks.reference keys > docs/keys.md"
    for name in all_keys():
        assert f"| `{name}` |" in page


def test_every_key_of_the_table_is_of_a_kind_and_in_a_block():
    for name, key in all_keys().items():
        assert key.choices or key.kind in KINDS, name
        assert key.help.endswith(".") and "\n" not in key.help, name
        assert key.default in (None, REQUIRED) or key.fault(key.default) is None, name
        block = name.rpartition(".")[0]
        assert not block or "block" in all_keys()[block].kind or all_keys()[block].is_open, name


@pytest.mark.parametrize(
    ("name", "may"),
    [
        ("optimizer.lr", True),
        ("optimizer._component_", False),
        ("epochs", True),
        ("model.lora_rank", False),
        ("resources.nodes", True),
        ("profiler.ranks", True),
        ("dataset_val.split", True),
        ("dataset.split", False),
        ("nothing", False),
    ],
)
def test_which_keys_may_change_when_a_run_resumes(name, may):
    assert may_change(all_keys(), name) is may
