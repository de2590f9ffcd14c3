"""What a recipe's `prepare` block makes on this machine before its first run, such as a model."""

import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launcher import paths, venv
from launcher.errors import PreflightFault, RecipeFault
from launcher.recipe.model import Recipe
from launcher.site import Site


def missing(recipe: Recipe, cluster: Site) -> Mapping[str, Any]:
    """Return the block `prepare` if what it makes is not there yet, else {}."""
    block: Mapping[str, Any] = recipe.resolved(cluster.root, "run").get("prepare") or {}
    module = str(block.get("module", ""))
    if block and not re.fullmatch(r"(trainer|plugins)(\.[a-z_]+)+", module):
        raise RecipeFault(f"prepare.module {module!r} in {recipe.path} must be a module of the kit")
    return {} if Path(str(block.get("creates", ""))).exists() else block


def prepare(recipe: Recipe, cluster: Site, say: Callable[[str], None]) -> bool:
    """Make what the recipe's block `prepare` names unless it is there; return whether it was made.

    Raises:
        PreflightFault: the module failed; the message holds its last line.
    """
    if not (block := missing(recipe, cluster)):
        return False
    module, folder = block["module"], Path(str(block["creates"])).parent
    say(f"preparing {folder} (python -m {module}); this is done once")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [str(venv.python()), "-m", module, *map(str, block.get("args") or [])],
            cwd=paths.REPO_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except OSError as error:
        raise PreflightFault(
            f"cannot prepare {folder}: {error}: set up the virtual environment with: bash setup.sh"
        ) from error
    if done.returncode != 0:
        output = done.stdout.decode(errors="replace").strip().splitlines() or ["no message"]
        raise PreflightFault(
            f"python -m {module} failed with exit status {done.returncode}: {output[-1]}"
        )
    return True
