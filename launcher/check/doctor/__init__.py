"""Whether this site can run the kit: Slurm, accounts, storage, nodes, packages.

No check hides another, and each finding that is not ok says what to do. What only a node knows
is asked of one by a short job (nodes.py).
"""

from launcher.check import Finding, failed, skipped
from launcher.check import findings as findings_of
from launcher.check.doctor import host, nodes, slurm
from launcher.errors import SlurmFault, SlurmMissing, SlurmTimeout
from launcher.site import Site

_UNKNOWN = "Slurm does not answer, so this is not known"


def examine(cluster: Site, wait_s: float) -> list[Finding]:
    """Check everything; return all findings in a fixed order.

    Args:
        wait_s: how long the job that asks a node may wait to start.
    """
    findings, site = _slurm(cluster)
    findings += findings_of("virtual environment", host.environment)
    findings += findings_of("shared folder", host.shared_folder, cluster)
    about_nodes = [skipped("nodes", "Slurm does not answer, so no node was asked")]
    if site:
        about_nodes = findings_of("nodes", nodes.findings, site, wait_s)
    return [*findings, *about_nodes]


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
    findings = slurm.controller(site)
    for subject, check in slurm.CHECKS.items():
        findings += findings_of(subject, check, site)
    return findings, site
