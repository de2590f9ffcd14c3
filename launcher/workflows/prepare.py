"""What a recipe's `prepare` block makes on this machine before its first run, such as a model."""

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launcher import paths
from launcher.errors import PreflightFault, RecipeFault
from launcher.recipes.recipe import Recipe
from launcher.site import Site


@dataclass(frozen=True)
class Preparation:
    """A module of the trainer that makes what a recipe needs, and a file that then exists."""

    module: str
    arguments: list[str]
    creates: Path


def missing(recipe: Recipe, cluster: Site) -> Preparation | None:
    """Return what has to be made on this machine before the recipe can run, None for nothing."""
    block = recipe.resolved(cluster.root, "run").get("prepare")
    if not block:
        return None
    module, creates = str(block.get("module", "")), Path(str(block.get("creates", "")))
    if not re.fullmatch(r"trainer(\.[a-z_]+)+", module):
        raise RecipeFault(f"prepare.module {module!r} in {recipe.path} must be a module of trainer")
    arguments = [str(argument) for argument in block.get("args") or []]
    return None if creates.exists() else Preparation(module, arguments, creates)


def prepare(wanted: Preparation, say: Callable[[str], None]) -> None:
    """Run the module that makes what is missing."""
    module, folder = wanted.module, wanted.creates.parent
    say(f"preparing {folder} (python -m {module}); this is done once")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [str(paths.venv_root() / "bin" / "python"), "-m", module, *wanted.arguments],
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
