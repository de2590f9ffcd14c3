"""All that can be known on the login node before a job is queued; no fault hides another."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.checks import (
    Check,
    Context,
    Skipped,
    components,
    dataset,
    environment,
    layout,
    model,
    scheduler,
    script,
    secrets,
    size,
)
from launcher.checks.finding import Finding, faults_of, of_error, skipped
from launcher.errors import CookbookError

# The subject of its findings, whether it is made even with --no-check, and the check.
CHECKS: tuple[tuple[str, bool, Check], ...] = (
    ("layout", True, layout.layout),
    ("secrets", True, secrets.secrets),
    ("script", True, script.script),
    ("virtual environment", True, environment.python),
    ("model", False, model.weights),
    ("tokenizer", False, model.tokenizer),
    ("dataset", False, dataset.files),
    ("GPU memory", False, size.memory),
    ("disk space", False, size.disk),
    ("components", False, components.components),
    ("Slurm limits", False, scheduler.limits),
    ("sbatch test", False, scheduler.test_only),
)


def check(context: Context, skip: bool = False) -> Iterator[Finding]:
    """Yield what each check finds, in order; skip leaves out those that may be left out."""
    for subject, needed, look in CHECKS:
        if skip and not needed:
            yield skipped(subject, "--no-check")
        else:
            yield from findings(subject, look, context)


def findings(subject: str, look: Check, context: Context) -> list[Finding]:
    """Return what one check finds."""
    try:
        return list(look(context))
    except Skipped as why:
        return [skipped(subject, str(why))]
    except CookbookError as error:
        return of_error(subject, error)


def faults(context: Context, skip: bool = False) -> list[str]:
    """Return all faults, one line each; [] if the run may be queued."""
    return faults_of(check(context, skip))
