"""Every error that the cookbook command reports on purpose.

    CookbookError             exit 1   something outside the command line failed
    |-- UsageFault            exit 2   what was typed or written in a file is wrong
    |   |-- RecipeFault                a recipe, a cluster file or an override
    |   `-- UnknownRun                 no run, or several, answer to that name
    |-- PreflightFault        exit 1   the recipe is well formed, this machine cannot run it
    |-- SlurmFault            exit 1   Slurm refused; its own words are in the message
    |   |-- SlurmMissing               no Slurm command on this machine
    |   `-- SlurmTimeout               Slurm did not answer; the job may exist all the same
    |-- HubFault              exit 1   a model or dataset cannot be had from the hub
    `-- RunFault              exit 1   a run's folder or files cannot be used

An error carries one or more faults. Each fault is one line that says what is wrong, where,
and what to type next; all faults that can be found are found before the error is raised.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class CookbookError(Exception):
    """One or more faults, each a line of its own, and the command's exit status."""

    exit_code = 1

    def __init__(self, faults: str | Iterable[str]) -> None:
        self.faults = [faults] if isinstance(faults, str) else list(faults)
        super().__init__("\n".join(self.faults))


class UsageFault(CookbookError):
    """What was typed, or written in a file, is wrong."""

    exit_code = 2


class RecipeFault(UsageFault):
    """A recipe, a cluster file or an override is wrong."""


class UnknownRun(UsageFault):
    """No run, or more than one, answers to the given name."""


class PreflightFault(CookbookError):
    """The recipe is well formed, but this machine or cluster cannot run it."""


class SlurmFault(CookbookError):
    """A Slurm command failed; the message holds Slurm's own words."""


class SlurmMissing(SlurmFault):
    """The Slurm commands are not installed here."""


class SlurmTimeout(SlurmFault):
    """The controller did not answer in time: what was asked for may have happened."""


class HubFault(CookbookError):
    """A model or dataset cannot be fetched from the hub, or is not what the hub says."""


class RunFault(CookbookError):
    """A run's folder or one of its files cannot be read or written."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint ' (did you mean X?)' for a mistyped name, or '' where nothing is near."""
    known = list(known)
    longer = [other for other in known if len(name) > 2 and other.startswith(name)]
    close = sorted(longer, key=lambda other: (len(other), other))
    close = close or get_close_matches(name, known, n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""
