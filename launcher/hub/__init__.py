"""A recipe's model and dataset from the Hugging Face hub to the shared folder.

huggingface_hub lists, fetches and verifies; the token that it finds is never printed or written.
"""

import shutil
from pathlib import Path

from launcher.check import existing_parent
from launcher.check.files import checkpoint_files, tokenizer_files
from launcher.errors import HubFault, RecipeFault
from launcher.hub import fetch
from launcher.hub.answers import in_words
from launcher.hub.repository import Repository, Say
from launcher.recipe.model import Recipe
from launcher.site import Site


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
        size = sum(each.files[name].size for name in each.missing)
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
                fetch.find_missing(each)
            repositories.append(each)
        except HubFault as fault:
            faults += fault.faults
    if faults := [*faults, *_faults_of_room(repositories)]:
        raise HubFault(dict.fromkeys(faults))
    records = []
    for each in repositories:
        say(f"{each.kind} {each.summary}")
        with in_words(each):
            records.append(fetch.fetch(each, f"cookbook download {recipe.given_name}", say))
        if each.kind == "dataset":
            fetch.make_tables(recipe, cluster, each, say)
    return records
