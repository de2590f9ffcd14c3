"""Every error that the cookbook command reports on purpose.

    CookbookError             exit 1   something outside the command line failed
    |-- UsageFault            exit 2   what was typed or written in a file is wrong
    |   |-- RecipeFault                a recipe, a cluster file or an override
    |   `-- UnknownRun                 no run, or several, match that name
    |-- PreflightFault        exit 1   the recipe is well formed, this machine cannot run it
    |-- SlurmFault            exit 1   Slurm refused; its own words are in the message
    |   |-- SlurmMissing               no Slurm command on this machine
    |   `-- SlurmTimeout               Slurm did not answer; the job may exist all the same
    |-- HubFault              exit 1   a model or dataset cannot be fetched from the hub
    |-- RunFault              exit 1   a run's directory or files cannot be used
    |-- StoreFault            exit 1   the tracking store or registry cannot be used
    |-- RemoteFault                     the host of --host cannot be reached, or reports faults
    |-- GateFault             exit 1   a model version does not pass the gates of an alias
    `-- EndpointFault         exit 1   a served model cannot be reached or does not answer

An error carries one or more faults. Each fault is one line that says what is wrong, where,
and what to type next; all faults that can be found are found before the error is raised.
"""

import errno
import os
import shlex
from collections.abc import Iterable

from runspec.hints import nearest as nearest
from runspec.hints import nearest_key as nearest_key
from runspec.storage import OF_A_DISK, is_of_storage


class CookbookError(Exception):
    """One or more faults, each one line, and the exit status of the command."""

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
    """No run, or more than one, matches the given name."""


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
    """A run's directory or one of its files cannot be read or written."""


class StoreFault(CookbookError):
    """The tracking store or the registry is locked, of another version, or not reachable."""


class RemoteFault(CookbookError):
    """The host of --host cannot be reached, or has no kit; or the faults that its side reports."""

    def __init__(self, faults: str | Iterable[str], exit_code: int = 1) -> None:
        super().__init__(faults)
        self.exit_code = exit_code


class GateFault(CookbookError):
    """A model version does not pass the gates of an alias; one fault per gate, with figures."""


class EndpointFault(CookbookError):
    """A served model cannot be reached, or does not answer as it should."""


def of_the_system(error: OSError) -> str | None:
    """Say what the system refused, where and what to do; None if it names no file.

    An error that names none, such as of a socket, is a fault of the kit's if it was not expected.
    """
    if is_of_storage(error):
        what = f"{error.filename or 'a file'} cannot be read now ({error.strerror})"
        return f"{what}: check its filesystem, and try again"
    if not isinstance(error.filename, str | bytes):
        return None
    path = os.fsdecode(error.filename)
    quoted = shlex.quote(path)
    remedy = f"look at it with: namei -l {quoted}"
    if error.errno in (errno.EACCES, errno.EPERM):
        remedy = f"ask its owner for access; who that is, says: namei -l {quoted}"
    elif error.errno in OF_A_DISK:
        remedy = f"free some space there; see: df -h {quoted}"
    return f"{path}: {error.strerror}: {remedy}"
