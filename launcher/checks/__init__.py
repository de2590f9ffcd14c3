"""The single checks that are made of a run before it is queued, and what they are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from launcher import slurm
from launcher.cluster import Cluster
from launcher.limits import Rights
from launcher.recipe import Recipe, Resources
from launcher.render import with_site_defaults


class Skipped(Exception):
    """A check cannot be made here; its text says why."""


@dataclass(frozen=True)
class Context:
    """What is checked: a recipe on a cluster, resolved for a run that does not exist yet.

    local: it will run on this host, without Slurm. prepared: the model's files should be there,
    not made first by the recipe's prepare. elsewhere: paths that only the nodes have.
    """

    recipe: Recipe
    cluster: Cluster
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
        """What sinfo says; SlurmFault where it does not answer, asked again then."""
        return slurm.partitions(hidden=True)

    @cached_property
    def rights(self) -> Rights | None:
        """What accounting lets the user do, None where there is none; SlurmFault as above."""
        return slurm.rights(slurm.configuration())

    def here(self, path: Path) -> bool:
        """Whether a path is to be found on this machine."""
        on_nodes = (*self.elsewhere, *self.cluster.node_paths)
        return not any(path.is_relative_to(each) for each in on_nodes)


# Answers: a list of faults, or, where there is none, one line that says what was found.
Check = Callable[[Context], list[str] | str]


def unreadable(path: Path) -> str | None:
    """Say why a file or folder cannot be read, None where it can."""
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
