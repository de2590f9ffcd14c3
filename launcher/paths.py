"""Where the kit's files lie: the checkout, the shared folder and the virtual environment."""

import os
import re
import sys
from pathlib import Path

from launcher.errors import UsageFault

REPO_ROOT = Path(__file__).resolve().parent.parent
RECIPES = REPO_ROOT / "configs" / "recipes"
BASES = REPO_ROOT / "configs" / "base"
SWEEPS = REPO_ROOT / "configs" / "sweeps"
# Settings of sites: the checkout's, and those in use. cookbook replay submits from a copy of the
# code, with the settings of the site as they are now.
OWN_CLUSTERS = REPO_ROOT / "configs" / "clusters"
CLUSTERS = Path(os.environ.get("COOKBOOK_CLUSTERS") or OWN_CLUSTERS)
ENVIRONMENTS = REPO_ROOT / "configs" / "environments"
EVALS = REPO_ROOT / "configs" / "evals"
GATES = REPO_ROOT / "configs" / "gates"
GPUS = REPO_ROOT / "configs" / "gpus.yaml"
TEMPLATES = REPO_ROOT / "templates"
# What cookbook download writes into a model's folder.
DOWNLOAD_RECORD = "cookbook-download.json"

# An #SBATCH line has no escape that all Slurm versions read in the same way, % is a pattern in
# --output, and # starts a comment: a path with one of these never reaches a script.
_PATH_NOT_FOR_SBATCH = re.compile(r"[\s\"'`$\\%#;&|<>*?!(){}\[\]]|[^\x20-\x7e]")

# File systems take 255 bytes in a name; a path of Linux has 4095, and a run's files add to it.
_LONGEST_NAME, _LONGEST_PATH = 255, 2000


def shared_root(configured: str | None = None) -> Path:
    """Return the folder that login and compute nodes share, with runs/ and models/ in it.

    COOKBOOK_ROOT comes first, then the cluster file's shared_root, then the checkout itself.
    """
    chosen = os.environ.get("COOKBOOK_ROOT") or configured
    root = Path(chosen).expanduser().absolute() if chosen else REPO_ROOT
    if len(str(root)) > _LONGEST_PATH or max(map(len, root.parts)) > _LONGEST_NAME:
        raise UsageFault(
            f"the path {str(root)[:60]}... has {len(str(root))} characters: set COOKBOOK_ROOT to "
            f"one of {_LONGEST_PATH} at most, with names of {_LONGEST_NAME} at most"
        )
    if bad := _PATH_NOT_FOR_SBATCH.search(str(root)):
        message = f"the path {str(root)!r} has {bad.group()!r}, which a job script cannot carry"
        remedy = "set COOKBOOK_ROOT to a path of letters, digits, '.', '_' and '-'"
        raise UsageFault(f"{message} safely: {remedy}")
    return root


def sent(root: Path) -> Path:
    """Return this user's folder in the shared one for a laptop's files and the answers to it."""
    return root / f"sent-{os.getuid()}"


# The same file of a laptop is in another tree once anything in its tree has changed.
_SENT_TREE = re.compile(r".*/sent-\d+/trees/[0-9a-f]{64}(?=/)")


def own_name(path: str) -> str:
    """Return a sent file's path on the laptop, and any other path as it is."""
    inside, count = _SENT_TREE.subn("", path, count=1)
    return os.path.normpath(inside) if count else path


def venv_root() -> Path:
    """Return the virtual environment of jobs: COOKBOOK_VENV, or the one this command runs in."""
    chosen = os.environ.get("COOKBOOK_VENV")
    return Path(chosen).expanduser().absolute() if chosen else Path(sys.prefix)


def user_cache() -> Path:
    """Return the folder of this user for what can be computed again."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "slurm-cookbook"
