"""cookbook doctor"""

from __future__ import annotations

import json
import sys

import click

from launcher import cluster as clusters
from launcher import doctor as examination
from launcher.cli.common import cluster_option, note
from launcher.node_check import table


@click.command()
@click.option("--node-check", is_flag=True, help="Ask every node of the partition, by one job.")
@click.option("--nodes", type=click.IntRange(min=1), help="With --node-check: this many of them.")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=1, max=3600),
    metavar="SECONDS",
    help="How long a node may be waited for. [default: 3; with --node-check 60]",
)
@click.option("--json", "as_json", is_flag=True, help="Print for a program to read.")
@cluster_option
def doctor(
    node_check: bool, nodes: int | None, wait_s: float | None, as_json: bool, cluster: str | None
) -> None:
    """Look whether this site can run the kit; whatever is not ok comes with its remedy."""
    if nodes and not node_check:
        raise click.UsageError("--nodes goes with --node-check")
    options = (
        examination.every_node(nodes, wait_s)
        if node_check
        else examination.Options(wait_s=wait_s or 3)
    )
    if node_check:
        note("asking the nodes; this takes about a minute once they are free")
    answer = examination.examine(clusters.load(cluster), options)
    if as_json:
        rows = examination.as_rows(answer.findings)
        click.echo(json.dumps({"findings": rows, "nodes": answer.nodes}, indent=1))
    else:
        for finding in answer.findings:
            click.echo(f"{finding.state:<8} {finding.check:<16} {finding.line}")
        for line in ["", *table(answer.nodes)] if answer.nodes else []:
            click.echo(line)
    sys.exit(1 if answer.failed else 0)
