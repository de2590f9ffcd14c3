"""All that can be known on the login node before a job is queued; no fault hides another."""

from collections.abc import Iterator

from launcher import check as checks
from launcher.plugins import Check, load, plugins

_HERE = "launcher.check"
# Those that start something start the trainer or another environment.
CHECKS = (
    Check("layout", f"{_HERE}.recipe:layout", needed=True),
    Check("secrets", f"{_HERE}.recipe:secrets", needed=True),
    Check("script", f"{_HERE}.recipe:script", needed=True),
    Check("virtual environment", f"{_HERE}.environment:python", needed=True),
    Check("environment", f"{_HERE}.inside:inside", starts=True),
    Check("torch build", f"{_HERE}.environment:torch_build"),
    Check("model", f"{_HERE}.files:weights"),
    Check("tokenizer", f"{_HERE}.files:tokenizer"),
    Check("dataset", f"{_HERE}.files:dataset"),
    # Before the components, which the same start of the trainer answers for.
    Check("samples", f"{_HERE}.samples:counted", starts=True),
    Check("components", f"{_HERE}.recipe:components", starts=True),
    Check("Slurm limits", f"{_HERE}.scheduler:limits"),
    Check("sbatch test", f"{_HERE}.scheduler:test_only"),
)


def every() -> list[Check]:
    """Return all checks, those of plug-ins last."""
    return [*CHECKS, *(each for plugin in plugins() for each in plugin.checks)]


def check(
    context: checks.Context, skip: bool = False, quick: bool = False
) -> Iterator[checks.Finding]:
    """Yield what each check finds, in order.

    skip leaves out those that may be left out, quick those that start something.
    """
    for each in every():
        if quick and each.starts:
            continue
        if skip and not each.needed:
            yield checks.skipped(each.subject, "--no-check")
        else:
            yield from checks.findings(each.subject, load(each.target), context)


def faults(context: checks.Context, skip: bool = False, quick: bool = False) -> list[str]:
    """Return all faults, one line each; [] if the run may be queued."""
    return checks.faults_of(check(context, skip, quick))


def faults_after_build(context: checks.Context) -> list[str]:
    """Return the faults of the checks that ask an environment which was just built."""
    again = [each for each in every() if each.after_build]
    found = [checks.findings(each.subject, load(each.target), context) for each in again]
    return checks.faults_of(finding for each in found for finding in each)
