"""A recipe's model and dataset from the Hugging Face hub to the shared folder.

huggingface_hub lists, fetches and verifies; the token that it finds is never printed or written.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from launcher.checks import existing_parent
from launcher.checks.finding import Finding, failed, faults_of, of_error, ok
from launcher.errors import HubFault
from launcher.hub import fetch, tables
from launcher.hub.faults import in_words
from launcher.hub.repository import Repository
from launcher.hub.wanted import wanted
from launcher.recipes.recipe import Recipe
from launcher.site import Site


def check(
    recipe: Recipe, cluster: Site, revision: str | None, allow_pickle: bool
) -> tuple[list[Repository], list[Finding]]:
    """Ask the hub for all that the recipe names; nothing is fetched.

    The findings hold every fault that can be known before the first byte.
    """
    repositories, found = [], []
    for each in wanted(recipe, cluster, revision):
        try:
            with in_words(each):
                each.ask(allow_pickle)
                fetch.find_missing(each)
            repositories.append(each)
            found.append(ok(each.kind, each.summary))
        except HubFault as fault:
            found += of_error(each.kind, fault)
    return repositories, found + _room(repositories)


def _room(repositories: list[Repository]) -> list[Finding]:
    """Compare what is still to be fetched with the free space of each filesystem."""
    needed: dict[int, tuple[Path, int]] = {}
    for each in repositories:
        place = existing_parent(each.folder)
        device = place.stat().st_dev
        size = sum(each.files[name].size for name in each.missing)
        needed[device] = (place, needed.get(device, (place, 0))[1] + size)
    found = []
    for place, size in needed.values():
        free = shutil.disk_usage(place).free
        words = f"{size / 2**30:.2f} GiB are to be fetched, and {place} has {free / 2**30:.1f} GiB"
        fault = failed("disk space", f"{words} free", "make room, or set COOKBOOK_ROOT")
        found.append(fault if size > free else ok("disk space", f"{words} free"))
    return found


def download(
    recipe: Recipe,
    cluster: Site,
    revision: str | None,
    allow_pickle: bool,
    say: Callable[[str], None],
) -> list[Path]:
    """Fetch, verify and record all that the recipe names; return the records' paths.

    What is there already and whole is kept. HubFault lists every fault.
    """
    repositories, found = check(recipe, cluster, revision, allow_pickle)
    if faults := faults_of(found):
        raise HubFault(faults)
    records = []
    for each in repositories:
        say(f"{each.kind} {each.summary}")
        with in_words(each):
            records.append(fetch.fetch(each, f"cookbook download {recipe.given_name}", say))
        if each.kind == "dataset":
            tables.make(recipe, cluster, each, say)
    return records
