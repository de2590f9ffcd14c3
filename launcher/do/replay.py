"""Submitting a run again from its provenance: its recipe, and the code that made it."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from launcher import paths, yamlfile
from launcher.errors import UsageFault
from launcher.recipe import entries
from launcher.run import code
from launcher.run.directory import Run
from launcher.site import Site
from runspec import files

# The folder of replayed recipes, in the shared folder.
_FOLDER = "replays"


class Replay(NamedTuple):
    """What submits a run again: a command of the launcher of the code that made it."""

    argv: list[str]
    # The folder of that code.
    code: Path
    environment: dict[str, str]


def prepare(run: Run, site: Site, options: Sequence[str], say: Callable[[str], None]) -> Replay:
    """Make the code and the recipe of a run ready to be submitted, and say what cannot be the same.

    options: of submit.

    Raises:
        UsageFault: the run cannot be replayed.
        RunFault: the present code, if it has to be used, cannot be copied.
    """
    recipe = run.path / files.RECIPE
    if not run.provenance or not recipe.is_file():
        message = f"{run.name} has no {files.PROVENANCE} and {files.RECIPE}"
        raise UsageFault(f"{message}, so it cannot be replayed: submit your own recipe")
    config = yamlfile.load(recipe)
    if entries.of(config).own_code:
        message = f"{run.name} ran its own script, which replay does not support"
        raise UsageFault(f"{message}: its code is in {run.path / files.CODE}; submit it from there")
    kit = _code(run, site, say)
    name = str(run.submission.get("recipe") or "recipe")
    copy = site.root / _FOLDER / run.name / f"{name}.yaml"
    copy.parent.mkdir(parents=True, exist_ok=True)
    # The new run has a directory of its own.
    config.pop("output_dir", None)
    files.write_text(copy, yamlfile.dump(config))
    say("not the same: nodes, the order of sums between ranks on GPUs; it begins at step 0")
    say(f"once it is submitted, compare both runs with: cookbook diff {run.name} last")
    argv = [sys.executable, "-m", "launcher", "submit", str(copy), "--name", run.name[16:-5]]
    argv += ["--cluster", site.name] if site.name != "default" else []
    own = {"COOKBOOK_ROOT": str(site.root), "COOKBOOK_VENV": str(paths.venv_root())}
    # A site's settings are no part of the code.
    own |= {"COOKBOOK_CLUSTERS": str(paths.CLUSTERS), "PYTHONPATH": str(kit)}
    return Replay([*argv, *options], kit, {**os.environ, **own})


def _code(run: Run, site: Site, say: Callable[[str], None]) -> Path:
    """Return the copy of the code that a run used; without one, of the present code."""
    used = code.of_run(run.path)
    if used is None:
        say("not the same: the code, because there is no copy of it: the current code is used")
        return code.present(site.root).folder
    code.require(used, site.trusted_users)
    if used.sha256 != code.present_sha256():
        say(f"code: {used.title}, in {used.folder}")
    return used.folder
