"""The node check's summary: equal findings of several nodes as one, and a table of the nodes."""

from __future__ import annotations

import re
from dataclasses import replace

from launcher.checks.finding import Finding
from launcher.checks.nodes.ask import NodeReport, natural

# Stands for the node's name in what several nodes report alike.
_NODE = "\0"

# A node as the table shows it, by column.
Row = dict[str, str]


def joined(found: list[Finding], nodes: list[str]) -> list[Finding]:
    """Return findings that differ only by the node's name as one, which names all the nodes."""
    alike: dict[Finding, list[str]] = {}
    for each in found:
        pattern = re.compile(rf"\b({'|'.join(map(re.escape, nodes))})\b")
        name = match.group() if (match := pattern.search(each.words)) else ""
        alike.setdefault(_renamed(each, name, _NODE), []).append(name)
    return [_renamed(each, _NODE, ",".join(names)) for each, names in alike.items()]


def _renamed(finding: Finding, name: str, other: str) -> Finding:
    if not name:
        return finding
    pattern = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
    words, remedy = (pattern.sub(other, text) for text in (finding.words, finding.remedy))
    return replace(finding, words=words, remedy=remedy)


def rows(reports: list[NodeReport], others: dict[str, str]) -> list[Row]:
    """Return one row per node; others are those without a report, and why."""
    found = [_row(report) for report in reports]
    return found + [
        {"node": name, "reached": why}
        for name, why in sorted(others.items(), key=lambda item: natural(item[0]))
    ]


def _row(report: NodeReport) -> Row:
    both_ways = report.yes("shared_read") and report.seen_here and report.yes("checkout")
    free, packages = report.disk_gib, report.one("packages", "fault")
    gpus = [gpu[1] for gpu in report.gpus]
    took = int(report.one("import_ms", "0")) / 1000
    return {
        "node": report.name,
        "reached": "yes" if report.yes("finished") else "in part",
        "files": "shared" if both_ways else "NOT SHARED",
        "skew": f"{report.skew_s:+.1f} s",
        "python": report.one("python", "-"),
        "import": "failed" if packages.startswith(("fault", "missing")) else f"{took:.1f} s",
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
