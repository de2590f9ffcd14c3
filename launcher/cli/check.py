"""cookbook check"""

from __future__ import annotations

import json
import sys

import click

from launcher import cluster as clusters
from launcher import jobs, preflight
from launcher import recipe as recipe_file
from launcher.cli.common import cluster_option, on_nodes_option, resource_options


@click.command()
@click.argument("recipe_name", metavar="NAME")
@resource_options
@click.option("--local", is_flag=True, help="As for submit --local: ask no Slurm.")
@on_nodes_option
@click.option("--json", "as_json", is_flag=True, help="Print for a program to read.")
@cluster_option
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def check(
    recipe_name: str,
    local: bool,
    on_nodes: tuple[str, ...],
    as_json: bool,
    cluster: str | None,
    overrides: tuple[str, ...],
    **resources: str | int | None,
) -> None:
    """Look for everything that would stop a recipe's run, without queueing it.

    Exit status 1 where something failed. submit does the same first.
    """
    site = clusters.load(cluster)
    planned = jobs.plan(recipe_file.load(recipe_name, overrides, resources), site)
    results = []
    for result in preflight.check(jobs.context(planned, local, on_nodes)):
        results.append(result)
        if not as_json:
            for number, line in enumerate(result.lines):
                head = (result.state, result.name) if number == 0 else ("", "")
                click.echo(f"{head[0]:<8} {head[1]:<11} {line}")
    failed = sum(len(each.lines) for each in results if each.state == "failed")
    if as_json:
        rows = [{"check": r.name, "state": r.state, "lines": r.lines} for r in results]
        click.echo(json.dumps(rows, indent=1))
    else:
        faults = f"{failed} fault{'s' if failed != 1 else ''}"
        click.echo(f"{faults}: submit would refuse this" if failed else "submit would take this")
    sys.exit(1 if failed else 0)
