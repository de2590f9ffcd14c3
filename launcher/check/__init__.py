"""What every check shares: what is checked, and what a check found.

The checks before the queue, doctor and the download all answer with findings.
"""

import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from launcher import slurm
from launcher.errors import CookbookError
from launcher.recipe.model import Recipe, Resources
from launcher.site import Site, with_site_defaults
from launcher.slurm import executors
from launcher.slurm.job import Executor
from launcher.slurm.limits import Rights


class Skipped(Exception):
    """A check cannot be made here; its text says why."""


@dataclass(frozen=True)
class Finding:
    """One thing that was checked: its state, what it is, what was found, and the next step."""

    state: Literal["ok", "warning", "failed", "skipped"]
    subject: str
    message: str
    # Empty if there is nothing to do, or if the words name it already.
    remedy: str = ""

    @property
    def line(self) -> str:
        """What was found and the next step, in one line."""
        return f"{self.message}: {self.remedy}" if self.remedy else self.message


ok = partial(Finding, "ok")
warning = partial(Finding, "warning")
failed = partial(Finding, "failed")
skipped = partial(Finding, "skipped")


def faults_of(findings: Iterable[Finding]) -> list[str]:
    """Return what failed, one line per fault: two checks may find the same one."""
    return list(dict.fromkeys(each.line for each in findings if each.state == "failed"))


@dataclass(frozen=True)
class Context:
    """What is checked: a recipe on a cluster, resolved for a run that does not exist yet.

    executor: what will run it. prepared: the model's files should be there,
    not made first by the recipe's prepare.
    answers: the trainer's so far, by question; several checks ask, and a start takes seconds.
    """

    recipe: Recipe
    cluster: Site
    executor: Executor = field(default_factory=executors.choose)
    prepared: bool = True
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)

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

    def made_later(self, path: Path) -> bool:
        """Whether the recipe's prepare makes a path at submission."""
        creates = (self.config.get("prepare") or {}).get("creates")
        return not self.prepared and path.is_relative_to(Path(str(creates)).parent)

    def here(self, path: Path) -> bool:
        """Whether a path can be found on this machine."""
        return not any(path.is_relative_to(each) for each in self.cluster.node_paths)


def findings(subject: str, look: Callable[..., Iterable[Finding]], *given: object) -> list[Finding]:
    """Return what one check finds of what it is given, such as a Context.

    It may raise Skipped, CookbookError with faults, and what the system refuses.
    """
    try:
        return list(look(*given))
    except Skipped as why:
        return [skipped(subject, str(why))]
    except CookbookError as error:
        # They name their remedies themselves.
        return [failed(subject, fault) for fault in error.faults]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return [failed(subject, f"could not be checked: {error}", "fix that and try again")]


def unreadable(path: Path) -> str | None:
    """Say why a file or folder cannot be read, None if it can."""
    try:
        if path.is_dir():
            next(path.iterdir(), None)
        else:
            path.open("rb").close()
    except FileNotFoundError:
        return "does not exist"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None


def existing_parent(path: Path) -> Path:
    """Return a path, or the nearest folder above it that exists."""
    return next(each for each in (path, *path.parents) if each.exists())
