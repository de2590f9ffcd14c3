"""Which nodes doctor asks, what their reports come to, and the table of a node check."""

import re
from dataclasses import replace

from launcher import venv
from launcher.check import Finding, failed, of_error, ok, skipped
from launcher.check.doctor.ask import NodeReport, Options, Question, ask, natural
from launcher.check.doctor.report import all_reduce, node_findings
from launcher.check.doctor.slurm import SlurmAnswers
from launcher.errors import CookbookError
from launcher.recipe.model import Resources
from launcher.site import slurm_options
from launcher.slurm import Node

# What the job does not ask of Slurm, whatever the site file says.
_NOT_ASKED = ("mem", "time", "switches", "exclude")
# Stands for the node's name in what several nodes report alike.
_NODE = "\0"

# A node as the table shows it, by column.
Row = dict[str, str]


def findings(site: SlurmAnswers, options: Options) -> tuple[list[Finding], list[Row]]:
    """Ask one node, or every usable node of the partition, by one short job."""
    usable = [node for node in site.own_nodes if node.usable]
    if not usable:
        message = f"partition {site.partition} has no usable node to ask"
        return [skipped("nodes", message, "try again later, or with another --cluster")], []
    chosen = usable[: options.nodes] if options.every_node else []
    count = len(chosen) or 1
    gpus = min(sum(node.gpus.values()) for node in (chosen or usable))
    gpus = gpus if chosen else min(1, gpus)
    asked = replace(Resources.of(site.cluster.resources), partition=site.partition)
    srun = slurm_options(asked, site.cluster, gpus, _NOT_ASKED)
    if chosen:
        srun.append(f"--nodelist={','.join(node.name for node in chosen)}")
    question = Question(site.cluster, srun, count, gpus, venv.torch_build(), options)
    try:
        step, reports = ask(question)
    except CookbookError as error:
        return of_error("nodes", error), []
    if step.pending:
        message = (
            f"a job on {count} node{'s' * (count > 1)} of {site.partition} did not start within"
        )
        remedy = "try again when the queue is shorter, or wait longer with --wait SECONDS"
        message += f" {options.wait_s:.0f} s and was cancelled"
        return [skipped("nodes", message, remedy)], []
    if not reports:
        message = step.message or f"srun ended with status {step.exit_code} and no message"
        remedy = "try that srun by hand: srun --nodes=1 hostname"
        return [failed("nodes", f"no node could be asked: {message}", remedy)], []
    results = [finding for each in reports for finding in node_findings(each, question)]
    silent = {node.name for node in chosen} - {each.name for each in reports}
    results += [
        failed("nodes", f"{name} did not answer", f"exclude it: resources.exclude={name}")
        for name in sorted(silent)
    ]
    if not chosen:
        return results, []
    others = {node.name: _not_asked(node) for node in site.own_nodes if node not in chosen}
    others |= dict.fromkeys(silent, "no answer")
    # What needs attention and the result of the all-reduce; the table shows the rest.
    attention = [finding for finding in results if finding.state != "ok"]
    attention.append(all_reduce(reports))
    message = f"{len(reports)} of {len(site.own_nodes)} nodes of {site.partition} asked"
    together = joined(attention, [each.name for each in reports])
    return [ok("nodes", message), *together], rows(reports, others)


def _not_asked(node: Node) -> str:
    reason = "" if node.reason in ("", "none") else f" ({node.reason})"
    return f"not asked: {node.state}{reason}"


def joined(findings: list[Finding], nodes: list[str]) -> list[Finding]:
    """Return findings that differ only by the node's name as one, which names all the nodes."""
    alike: dict[Finding, list[str]] = {}
    for each in findings:
        pattern = re.compile(rf"\b({'|'.join(map(re.escape, nodes))})\b")
        name = match.group() if (match := pattern.search(each.message)) else ""
        alike.setdefault(_renamed(each, name, _NODE), []).append(name)
    return [_renamed(each, _NODE, ",".join(names)) for each, names in alike.items()]


def _renamed(finding: Finding, name: str, other: str) -> Finding:
    if not name:
        return finding
    pattern = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
    message, remedy = (pattern.sub(other, text) for text in (finding.message, finding.remedy))
    return replace(finding, message=message, remedy=remedy)


def rows(reports: list[NodeReport], others: dict[str, str]) -> list[Row]:
    """Return one row per node; others are those without a report, and why."""
    reached = [_row(each) for each in reports]
    return reached + [
        {"node": name, "reached": others[name]} for name in sorted(others, key=natural)
    ]


def _row(report: NodeReport) -> Row:
    both_ways = report.yes("shared_read") and report.seen_here and report.yes("checkout")
    free, packages = report.disk_gib, report.one("packages", "fault")
    gpus = [gpu[1] for gpu in report.gpus]
    return {
        "node": report.name,
        "reached": "yes" if report.yes("finished") else "in part",
        "files": "shared" if both_ways else "NOT SHARED",
        "skew": f"{report.skew_s:+.1f} s",
        "python": report.one("python", "-"),
        "import": "failed"
        if packages.startswith(("fault", "missing"))
        else f"{report.import_s:.1f} s",
        "gpus": f"{len(gpus)} x {gpus[0]}" if gpus else f"{report.one('gpus_given', '0')} by Slurm",
        "disk": "-" if free is None else f"{free:.0f} GiB",
        "network": ",".join(report.interfaces) or "-",
    }


def table(nodes: list[Row]) -> list[str]:
    """Return rows as lines under a head; a row with few columns has a reason in its last one."""
    columns = max(nodes, key=len)
    whole = [row for row in nodes if len(row) == len(columns)]
    widths = [max(len(name), *(len(row[name]) for row in whole)) for name in columns]
    head = [name.upper() for name in columns]
    lines = [head, *([row.get(name, "") for name in columns] for row in nodes)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
