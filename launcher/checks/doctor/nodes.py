"""Which nodes doctor asks, and what their reports come to."""

from __future__ import annotations

from dataclasses import dataclass

from launcher import venv
from launcher.checks.doctor.slurm import SlurmAnswers
from launcher.checks.finding import Finding, failed, of_error, ok, skipped
from launcher.checks.nodes import ask, table
from launcher.checks.nodes.findings import findings as node_findings
from launcher.checks.nodes.gpus import all_reduce
from launcher.errors import CookbookError
from launcher.executors.slurm import Node


@dataclass(frozen=True)
class Options:
    """Whether one node is asked or every node, at most `nodes` of them, and for how long."""

    every_node: bool = False
    nodes: int | None = None
    wait_s: float = 3
    limit_s: float = 20

    @classmethod
    def node_check(cls, nodes: int | None, wait_s: float | None) -> Options:
        """Return the options of a node check; imports on a cold filesystem take a minute."""
        wait_s = wait_s or 60
        return cls(every_node=True, nodes=nodes, wait_s=wait_s, limit_s=300 + wait_s)


def findings(site: SlurmAnswers, options: Options) -> tuple[list[Finding], list[table.Row]]:
    """Ask one node, or every usable node of the partition, by one short job."""
    usable = [node for node in site.own_nodes if node.usable]
    chosen = usable[: options.nodes] if options.every_node else []
    count = len(chosen) if options.every_node else 1
    if not usable:
        words = f"partition {site.partition} has no usable node to ask"
        return [skipped("nodes", words, "try again later, or with another --cluster")], []
    gpus = min(sum(node.gpus.values()) for node in (chosen or usable))
    gpus = gpus if options.every_node else min(1, gpus)
    question = ask.Question(
        cluster=site.cluster,
        options=_srun_options(site, chosen, gpus),
        nodes=count,
        full=options.every_node,
        cuda=venv.torch_build()[1],
        gpus_per_node=gpus,
        wait_s=options.wait_s,
        limit_s=options.limit_s,
    )
    try:
        step, reports = ask.ask(question)
    except CookbookError as error:
        return of_error("nodes", error), []
    if step.pending:
        words = f"a job on {count} nodes" if count > 1 else "a job on 1 node"
        words += f" of {site.partition} did not start within {options.wait_s:.0f} s"
        remedy = "try again when the queue is shorter, or wait longer with --wait SECONDS"
        return [skipped("nodes", f"{words} and was cancelled", remedy)], []
    if not reports:
        words = step.words or f"srun ended with status {step.exit_code} and no message"
        remedy = "try that srun by hand: srun --nodes=1 hostname"
        return [failed("nodes", f"no node could be asked: {words}", remedy)], []
    found = [finding for report in reports for finding in node_findings(report, question)]
    silent = {node.name for node in chosen} - {report.name for report in reports}
    found += [
        failed("nodes", f"{name} did not answer", f"exclude it: resources.exclude={name}")
        for name in sorted(silent)
    ]
    if not options.every_node:
        return found, []
    return _summary(site, chosen, reports, found, silent)


def _srun_options(site: SlurmAnswers, chosen: list[Node], gpus: int) -> list[str]:
    options = site.options(("account", "qos", "constraint", "reservation"), gpus)
    if site.partition:
        options.append(f"--partition={site.partition}")
    if chosen:
        options.append(f"--nodelist={','.join(node.name for node in chosen)}")
    return options


def _summary(
    site: SlurmAnswers,
    chosen: list[Node],
    reports: list[ask.NodeReport],
    found: list[Finding],
    silent: set[str],
) -> tuple[list[Finding], list[table.Row]]:
    """Return what needs attention and the result of the all-reduce; the table shows the rest."""
    asked = {node.name for node in chosen}
    others = {
        node.name: f"not asked: {node.state}"
        + (f" ({node.reason})" if node.reason not in ("", "none") else "")
        for node in site.own_nodes
        if node.name not in asked
    }
    others |= dict.fromkeys(silent, "no answer")
    attention = [finding for finding in found if finding.state != "ok"]
    together = table.joined([*attention, all_reduce(reports)], [each.name for each in reports])
    words = f"{len(reports)} of {len(site.own_nodes)} nodes of {site.partition} asked"
    return [ok("nodes", words), *together], table.rows(reports, others)
