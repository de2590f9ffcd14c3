"""cookbook doctor"""

from __future__ import annotations

import sys

import click

from launcher import site as clusters
from launcher.checks import doctor as examination
from launcher.checks.doctor.nodes import Options
from launcher.checks.nodes.table import table
from launcher.cli.common import cluster_option, note
from launcher.cli.findings import show


@click.command()
@click.option("--node-check", is_flag=True, help="Ask every node of the partition, by one job.")
@click.option("--nodes", type=click.IntRange(min=1), help="With --node-check: this many of them.")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=1, max=3600),
    metavar="SECONDS",
    help="How long the job may wait to start. [default: 3; with --node-check 60]",
)
@click.option("--json", "as_json", is_flag=True, help="Print for a program to read.")
@cluster_option
def doctor(
    node_check: bool, nodes: int | None, wait_s: float | None, as_json: bool, cluster: str | None
) -> None:
    """Check if this site can run the kit; each finding that is not ok comes with its remedy.

    Ends with status 1 if a check failed.
    """
    if nodes and not node_check:
        raise click.UsageError("--nodes goes with --node-check")
    options = Options.node_check(nodes, wait_s) if node_check else Options(wait_s=wait_s or 3)
    if node_check:
        note("asking the nodes; this takes about a minute once they are free")
    findings, nodes_asked = examination.examine(clusters.load(cluster), options)
    failed = show(findings, as_json, nodes=nodes_asked)
    if nodes_asked and not as_json:
        click.echo("\n".join(["", *table(nodes_asked)]))
    sys.exit(1 if failed else 0)
