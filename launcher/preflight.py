"""All that can be known on the login node before a job is queued; no fault hides another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.checks import Check, Context, Skipped, components, files, scheduler, setup, size
from launcher.errors import CookbookError

# Name, whether it is made even where checks are to be skipped, and the check.
CHECKS: tuple[tuple[str, bool, Check], ...] = (
    ("layout", True, setup.layout),
    ("secrets", True, setup.secrets),
    ("script", True, setup.script),
    ("model", False, files.model),
    ("tokenizer", False, files.tokenizer),
    ("data", False, files.data),
    ("memory", False, size.memory),
    ("disk", False, size.disk),
    ("components", False, components.components),
    ("scheduler", False, scheduler.limits),
    ("test-only", False, scheduler.test_only),
)


@dataclass(frozen=True)
class Result:
    """What one check found: ok with what it saw, failed with a fault a line, or skipped and why."""

    name: str
    state: str
    lines: tuple[str, ...]


def check(context: Context, skip: bool = False) -> Iterator[Result]:
    """Yield what each check found, in order; skip leaves out those that may be left out."""
    for name, needed, look in CHECKS:
        if skip and not needed:
            yield Result(name, "skipped", ("--no-check",))
        else:
            yield result(name, look, context)


def result(name: str, look: Check, context: Context) -> Result:
    """Return what one check found."""
    try:
        found = look(context)
    except Skipped as why:
        return Result(name, "skipped", (str(why),))
    except CookbookError as error:
        found = error.faults
    if isinstance(found, str):
        return Result(name, "ok", (found,))
    return Result(name, "failed", tuple(found))


def faults(context: Context, skip: bool = False) -> list[str]:
    """Return all faults, one line each; [] where the run may be queued."""
    return [line for each in check(context, skip) if each.state == "failed" for line in each.lines]
