"""Whether this site can run the kit: Slurm, accounts, storage, nodes, packages, hub.

No check hides another, and each finding that is not ok says what to do. What only a node knows
is asked of one by a short job (launcher/checks/nodes).
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterable

from launcher.checks.doctor import nodes, packages, slurm, storage
from launcher.checks.finding import Finding, failed, of_error, skipped
from launcher.checks.nodes.table import Row
from launcher.errors import CookbookError, SlurmFault, SlurmMissing, SlurmTimeout
from launcher.hub import token
from launcher.site import Site

_UNKNOWN = "Slurm does not answer, so this is not known"


def examine(cluster: Site, options: nodes.Options) -> tuple[list[Finding], list[Row]]:
    """Check everything; return all findings in a fixed order, and a node check's rows."""
    # The hub may take its time to answer, or not answer at all: it is asked meanwhile.
    hub_answer = _Later(lambda: _guarded("hub token", token.findings))
    findings, site = _slurm(cluster)
    findings += _guarded("virtual environment", packages.findings)
    findings += _guarded("shared folder", storage.findings, cluster)
    rows: list[Row] = []
    if site is None:
        findings.append(skipped("nodes", "Slurm does not answer, so no node was asked"))
    else:
        about_nodes, rows = nodes.findings(site, options)
        findings += about_nodes
    return [*findings, *hub_answer.result(4)], rows


def _guarded(
    subject: str, check: Callable[..., Iterable[Finding]], *arguments: object
) -> list[Finding]:
    """Run a check; one that breaks is a finding too, and hides no other."""
    try:
        return list(check(*arguments))
    except CookbookError as error:
        return of_error(subject, error)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return [failed(subject, f"could not be checked: {error}", "fix that and try again")]


class _Later:
    """A check that runs meanwhile and is not waited for at exit."""

    def __init__(self, check: Callable[[], list[Finding]]) -> None:
        self._found: list[Finding] = []
        self._thread = threading.Thread(target=lambda: self._found.extend(check()), daemon=True)
        self._thread.start()

    def result(self, timeout_s: float) -> list[Finding]:
        self._thread.join(timeout_s)
        late = skipped("hub token", f"the hub did not answer within {timeout_s:.0f} s")
        return self._found or [late]


def _slurm(cluster: Site) -> tuple[list[Finding], slurm.SlurmAnswers | None]:
    """Ask the controller; if it does not answer, say what therefore stays unknown."""
    try:
        site = slurm.ask(cluster)
    except SlurmFault as fault:
        # The other two kinds name their remedies.
        plain = not isinstance(fault, (SlurmMissing, SlurmTimeout))
        remedy = "see if scontrol ping answers" if plain else ""
        unknown = [skipped(subject, _UNKNOWN) for subject in slurm.CHECKS]
        return [*(failed("Slurm", each, remedy) for each in fault.faults), *unknown], None
    found = slurm.controllers(site)
    for subject, check in slurm.CHECKS.items():
        found += _guarded(subject, check, site)
    return found, site
