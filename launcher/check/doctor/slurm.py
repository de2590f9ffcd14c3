"""What Slurm says of itself: its partitions, accounting, and a job as the site asks for it."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from launcher import slurm
from launcher.check import Finding, failed, ok, warning
from launcher.errors import SlurmFault
from launcher.recipe.model import Resources
from launcher.site import Site, slurm_options
from launcher.slurm.limits import Rights


@dataclass(frozen=True)
class SlurmAnswers:
    """What Slurm reported, for the checks that build on it."""

    cluster: Site
    configuration: dict[str, str]
    partitions: dict[str, slurm.Partition]
    rights: Rights | None

    @property
    def partition(self) -> str | None:
        """The partition that jobs go to unless they say otherwise."""
        if named := self.cluster.resources.get("partition"):
            return str(named).split(",")[0]
        return next((each.name for each in self.partitions.values() if each.default), None)

    @property
    def own_nodes(self) -> list[slurm.Nodes]:
        """The nodes of that partition."""
        known = self.partitions.get(self.partition or "")
        return list(known.kinds) if known else []


def ask(cluster: Site) -> SlurmAnswers:
    """Ask the controller; SlurmFault if it does not answer."""
    configuration = slurm.configuration()
    rights = slurm.rights(configuration)
    return SlurmAnswers(cluster, configuration, slurm.partitions(), rights)


def controller(site: SlurmAnswers) -> list[Finding]:
    version = site.configuration.get("SLURM_VERSION", "of an unknown version")
    name, host = (site.configuration.get(key, "?") for key in ("ClusterName", "SlurmctldHost[0]"))
    return [ok("Slurm", f"Slurm {version} of cluster {name} answers from {host}")]


def _partitions(site: SlurmAnswers) -> Iterable[Finding]:
    subject = "partitions"
    if not site.partitions:
        remedy = "ask the site's administrators for access to one"
        yield failed(subject, "you can see no partition", remedy)
    for partition in site.partitions.values():
        gpus, alike = Counter[str](), [nodes for nodes in partition.kinds if nodes.count]
        for nodes in alike:
            for kind, count in nodes.gpus.items():
                gpus[f"{count} x {kind}" if kind else f"{count} GPUs"] += nodes.count
        each = ", ".join(f"{count} with {gpu}" for gpu, count in sorted(gpus.items()))
        message = f"{partition.name}{' (default)' * partition.default}: {partition.nodes} nodes"
        message += f" ({each})" if each else " without GPUs"
        message += f", time limit {partition.time_limit}"
        message += f", {sum(each.count for each in alike if each.state.startswith('idle'))} idle"
        out = [each for each in alike if not each.usable]
        if out and len(out) == len(alike):
            message += f"; none can be used ({out[0].state}: {out[0].reason})"
            yield warning(subject, message, "wait, or choose another --partition")
        else:
            message += f"; {sum(each.count for each in out)} cannot be used" if out else ""
            yield ok(subject, message)


def _accounting(site: SlurmAnswers) -> list[Finding]:
    subject, rights = "accounting", site.rights
    if not slurm.keeps_accounting(site.configuration):
        message = "this cluster keeps none; runs keep their own records, so nothing is missed"
        return [ok(subject, message)]
    if rights is None:
        message = "this cluster keeps it, and sacctmgr does not answer here"
        return [warning(subject, message, "tell the administrators; runs do not need it")]
    mine = sorted({f"{each.account}{' (default)' * each.default}" for each in rights.mine})
    qos = sorted({name for each in rights.mine for name in each.qos})
    message = f"it answers; your accounts: {', '.join(mine) or 'none'}"
    message += f"; QoS: {', '.join(qos) or 'none'}"
    limited = "limits are enforced" if "limits" in rights.enforced else "no limits are enforced"
    return [ok(subject, f"{message}; {limited}")]


def _sbatch_test(site: SlurmAnswers) -> list[Finding]:
    """Ask sbatch itself about a job on one whole node, with all that the site file asks for."""
    gpus = max((sum(nodes.gpus.values()) for nodes in site.own_nodes), default=0)
    asked = Resources.of(site.cluster.resources)
    options = ["--nodes=1", "--ntasks-per-node=1"]
    options += slurm_options(asked, site.cluster, gpus) + ["--exclusive"] * asked.exclusive
    script = "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in options), "true\n"])
    try:
        answer = slurm.test_only(script).removeprefix("sbatch: ")
        return [ok("sbatch test", f"not queued: {answer}")]
    except SlurmFault as fault:
        remedy = f"fix resources: in configs/clusters/{site.cluster.name}.yaml"
        message = f"{fault.faults[0]} to sbatch --test-only {' '.join(options)}"
        return [failed("sbatch test", message, remedy)]


CHECKS: dict[str, Callable[[SlurmAnswers], Iterable[Finding]]] = {
    "partitions": _partitions,
    "accounting": _accounting,
    "sbatch test": _sbatch_test,
}
