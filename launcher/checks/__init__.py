"""What is checked before a run is queued, on the login node and on the nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from launcher.checks.finding import Finding
from launcher.executors import slurm
from launcher.executors.slurm.limits import Rights
from launcher.recipes.recipe import Recipe, Resources
from launcher.site import Site, with_site_defaults


class Skipped(Exception):
    """A check cannot be made here; its text says why."""


@dataclass(frozen=True)
class Context:
    """What is checked: a recipe on a cluster, resolved for a run that does not exist yet.

    local: it will run on this host, without Slurm. prepared: the model's files should be there,
    not made first by the recipe's prepare. elsewhere: paths that only the nodes have.
    """

    recipe: Recipe
    cluster: Site
    local: bool = False
    prepared: bool = True
    elsewhere: tuple[str, ...] = ()

    @cached_property
    def config(self) -> dict[str, Any]:
        return self.recipe.resolved(self.cluster.root, "run")

    @cached_property
    def resources(self) -> Resources:
        return with_site_defaults(self.recipe.resources, self.cluster)

    @cached_property
    def partitions(self) -> dict[str, slurm.Partition]:
        """What sinfo says; SlurmFault if it does not answer, and then it is asked again."""
        return slurm.partitions(hidden=True)

    @cached_property
    def rights(self) -> Rights | None:
        """What accounting lets the user do, None if there is none; SlurmFault as above."""
        return slurm.rights(slurm.configuration())

    def here(self, path: Path) -> bool:
        """Whether a path can be found on this machine."""
        on_nodes = (*self.elsewhere, *self.cluster.node_paths)
        return not any(path.is_relative_to(each) for each in on_nodes)


# May raise Skipped, and CookbookError with faults.
Check = Callable[[Context], Iterable[Finding]]


def unreadable(path: Path) -> str | None:
    """Say why a file or folder cannot be read, None if it can."""
    try:
        if path.is_dir():
            next(path.iterdir(), None)
        else:
            with path.open("rb"):
                pass
    except FileNotFoundError:
        return "does not exist"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None


def existing_parent(path: Path) -> Path:
    """Return a path, or the nearest folder above it that exists."""
    while not path.exists():
        path = path.parent
    return path
