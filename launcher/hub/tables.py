"""The dataset as jobs read it: its tables are made here and once, so that nodes can be offline."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable

from launcher import venv
from launcher.errors import HubFault
from launcher.hub.repository import Repository
from launcher.recipes.recipe import Recipe
from launcher.site import Site

# What a dataset block may hold that changes which tables are made of the files.
_LOAD_KEYS = ("name", "data_dir", "data_files", "revision")

_LOAD = """
import json, sys
from datasets import load_dataset
repo, options = json.loads(sys.argv[1])
print({name: len(split) for name, split in load_dataset(repo, **options).items()})
"""


def make(recipe: Recipe, cluster: Site, repository: Repository, say: Callable[[str], None]) -> None:
    """Load the dataset in the virtual environment, with the HF_HOME that jobs have."""
    from huggingface_hub import constants

    block = recipe.resolved(cluster.root, "run").get("dataset")
    block = block if isinstance(block, dict) else {}
    options = {}
    if block.get("source") in (None, repository.name):
        options = {key: block[key] for key in _LOAD_KEYS if block.get(key) is not None}
    if repository.revision != "main":
        options["revision"] = repository.revision
    caches = ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "HUGGINGFACE_HUB_CACHE")
    variables = {key: value for key, value in os.environ.items() if key not in caches}
    variables["HF_HOME"] = str(cluster.root / "hf")
    # The login's own token is in the folder that HF_HOME now hides.
    variables["HF_TOKEN_PATH"] = constants.HF_TOKEN_PATH
    say(f"making the tables of {repository.name} in {cluster.root / 'hf' / 'datasets'}")
    done = subprocess.run(
        [str(venv.python()), "-c", _LOAD, json.dumps([repository.name, options])],
        cwd="/",
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        named = re.findall(r"^[\w.]*(?:Error|Exception)\b.*", done.stderr, re.MULTILINE)
        words = (named or done.stderr.strip().splitlines() or ["no message"])[-1]
        raise HubFault(
            f"the files of {repository.name} are there and whole, but datasets cannot read them: "
            f"{words}: fix the recipe's dataset block (name, data_dir, data_files), then try again"
        )
    say(f"{repository.name}: rows {done.stdout.strip()}")
