"""A recipe's model and dataset from the Hugging Face hub to the shared folder.

huggingface_hub lists, fetches and verifies; the token that it finds is never printed or written.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

from huggingface_hub import constants

from launcher import venv
from launcher.check import existing_parent
from launcher.check.files import checkpoint_files, tokenizer_files
from launcher.errors import HubFault, RecipeFault
from launcher.hub.answers import in_words
from launcher.hub.repository import Repository, Say
from launcher.recipe.model import Recipe
from launcher.site import Site

# What a dataset block may hold that changes which tables are made of the files.
_LOAD_KEYS = ("name", "data_dir", "data_files", "revision")

_LOAD = """
import json, sys
from datasets import load_dataset
repo, options = json.loads(sys.argv[1])
print({name: len(split) for name, split in load_dataset(repo, **options).items()})
"""


def _wanted(recipe: Recipe, cluster: Site) -> list[Repository]:
    """Return what the recipe names; RecipeFault if there is nothing to fetch."""
    config = recipe.resolved(cluster.root, "run")
    block = config.get("hub") or {}
    if not block:
        add = "hub: {model: ORGANISATION/NAME, dataset: ORGANISATION/NAME} to it"
        message = f"recipe {recipe.name} has no hub: block, so there is nothing to download"
        raise RecipeFault(f"{message}: add {add}, or give +hub.model=ORGANISATION/NAME")
    wanted = []
    if block.get("model"):
        name, _, named = block["model"].partition("@")
        checkpointer = config.get("checkpointer") or {}
        if not checkpointer.get("checkpoint_dir"):
            message = f"recipe {recipe.name} names no folder for its model: set"
            raise RecipeFault(f"{message} checkpointer.checkpoint_dir=")
        folder = Path(str(checkpointer["checkpoint_dir"]))
        files = [path for path in tokenizer_files(config).values() if path != folder]
        inside = [str(path.relative_to(folder)) for path in files if path.is_relative_to(folder)]
        needs = (*checkpoint_files(checkpointer), *inside)
        wanted.append(Repository("model", name, named or "main", folder, needs))
    if block.get("teacher"):
        name, _, named = block["teacher"].partition("@")
        key = recipe.entry.method.teacher_key if recipe.entry.method else ""
        if not (key and config.get(key)):
            message = f"recipe {recipe.name} names no folder for hub.teacher: set"
            raise RecipeFault(f"{message} entry=distill and teacher=")
        wanted.append(Repository("model", name, named or "main", Path(config[key]), key="teacher"))
    if block.get("dataset"):
        name, _, named = block["dataset"].partition("@")
        # Where jobs look, since their HF_HOME is hf/ of the shared root.
        folder = cluster.root / "hf" / "hub" / f"datasets--{name.replace('/', '--')}"
        wanted.append(Repository("dataset", name, named or "main", folder))
    return wanted


def _faults_of_room(repositories: list[Repository]) -> list[str]:
    """Compare what is still to be fetched with the free space of each filesystem."""
    needed: dict[int, tuple[Path, int]] = {}
    for each in repositories:
        place = existing_parent(each.folder)
        device = place.stat().st_dev
        size = sum(file.size for file in each.missing)
        needed[device] = (place, needed.get(device, (place, 0))[1] + size)
    return [
        f"{size / 2**30:.2f} GiB are to be fetched, and {place} has {free / 2**30:.1f} GiB free: "
        "make room, or set COOKBOOK_ROOT"
        for place, size in needed.values()
        if size > (free := shutil.disk_usage(place).free)
    ]


def download(recipe: Recipe, cluster: Site, say: Say) -> list[Path]:
    """Fetch, verify and record all that the recipe names; return the records' paths.

    What is there already and whole is kept. HubFault lists every fault that can be known before the
    first byte.
    """
    repositories, faults = [], list[str]()
    for each in _wanted(recipe, cluster):
        try:
            with in_words(each):
                each.ask()
            repositories.append(each)
        except HubFault as fault:
            faults += fault.faults
    if faults := [*faults, *_faults_of_room(repositories)]:
        raise HubFault(dict.fromkeys(faults))
    records = []
    for each in repositories:
        say(f"{each.kind} {each.summary}")
        with in_words(each):
            records.append(each.fetch(say))
        if each.kind == "dataset":
            _make_tables(recipe, cluster, each, say)
    return records


def _make_tables(recipe: Recipe, cluster: Site, repository: Repository, say: Say) -> None:
    """Load the dataset in the virtual environment, with the HF_HOME that jobs have.

    Its tables are made here and once, so that nodes can be offline.
    """
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
    argv = [str(venv.python()), "-c", _LOAD, json.dumps([repository.name, options])]
    done = subprocess.run(
        argv, cwd="/", env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        named = re.findall(r"^[\w.]*(?:Error|Exception)\b.*", done.stderr, re.MULTILINE)
        why = (named or done.stderr.strip().splitlines() or ["no message"])[-1]
        message = (
            f"the files of {repository.name} are there and whole, but datasets cannot read them"
        )
        remedy = "fix the recipe's dataset block (name, data_dir, data_files), then try again"
        raise HubFault(f"{message}: {why}: {remedy}")
    say(f"{repository.name}: rows {done.stdout.strip()}")
