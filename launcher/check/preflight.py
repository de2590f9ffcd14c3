"""All that can be known on the login node before a job is queued; no fault hides another."""

from collections.abc import Iterator

from launcher import check as checks
from launcher.check import environment, files, inside, recipe, samples, scheduler
from launcher.plugins import load, plugins

# The subject of its findings, whether it is made even with --no-check, and the check.
CHECKS: tuple[tuple[str, bool, checks.Check], ...] = (
    ("layout", True, recipe.layout),
    ("secrets", True, recipe.secrets),
    ("script", True, recipe.script),
    ("virtual environment", True, environment.python),
    (inside.SUBJECT, False, inside.inside),
    ("torch build", False, environment.torch_build),
    ("model", False, files.weights),
    ("tokenizer", False, files.tokenizer),
    ("dataset", False, files.dataset),
    # Before the components, which the same start of the trainer answers for.
    (samples.SUBJECT, False, samples.counted),
    ("components", False, recipe.components),
    ("Slurm limits", False, scheduler.limits),
    ("sbatch test", False, scheduler.test_only),
)
# They start the trainer or another environment, which takes seconds: a dry run leaves them out.
_START = (inside.inside, samples.counted, recipe.components)


def every() -> Iterator[tuple[str, bool, bool, checks.Check]]:
    """Yield subject, needed, whether it starts something, and the check: the core's own, then those
    of plug-ins.
    """
    for subject, needed, look in CHECKS:
        yield subject, needed, look in _START, look
    for plugin in plugins():
        for each in plugin.checks:
            yield each.subject, each.needed, each.starts, load(each.target)


def check(
    context: checks.Context, skip: bool = False, quick: bool = False
) -> Iterator[checks.Finding]:
    """Yield what each check finds, in order.

    skip leaves out those that may be left out, quick those that start something.
    """
    for subject, needed, starts, look in every():
        if quick and starts:
            continue
        if skip and not needed:
            yield checks.skipped(subject, "--no-check")
        else:
            yield from checks.findings(subject, look, context)


def faults(context: checks.Context, skip: bool = False, quick: bool = False) -> list[str]:
    """Return all faults, one line each; [] if the run may be queued."""
    return checks.faults_of(check(context, skip, quick))


def faults_after_build(context: checks.Context) -> list[str]:
    """Return the faults of the checks that ask an environment which was just built."""
    again = [each for plugin in plugins() for each in plugin.checks if each.after_build]
    found = [checks.findings(each.subject, load(each.target), context) for each in again]
    return checks.faults_of(finding for each in found for finding in each)
