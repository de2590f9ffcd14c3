"""cookbook recipes"""

from __future__ import annotations

import json

import click

from launcher import cluster as clusters
from launcher import recipe as recipe_file
from launcher import yamlfile
from launcher.cli.common import cluster_option


@click.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print for a program to read.")
@cluster_option
def recipes(name: str | None, as_json: bool, cluster: str | None) -> None:
    """List the recipes, or show NAME with everything resolved."""
    if name is not None:
        shown = recipe_file.load(name).resolved(clusters.load(cluster).root, "RUN_DIRECTORY")
        click.echo(json.dumps(shown, indent=1) if as_json else yamlfile.dump(shown), nl=as_json)
        return
    known = [recipe_file.load(each) for each in recipe_file.names()]
    if as_json:
        rows = [
            {
                "name": r.name,
                "method": r.method,
                "nodes": r.resources.nodes,
                "gpus_per_node": r.resources.gpus_per_node,
                "description": r.description,
            }
            for r in known
        ]
        click.echo(json.dumps(rows, indent=1))
        return
    click.echo(f"{'RECIPE':<16} {'METHOD':<7} {'NODES x GPUS':<13} DESCRIPTION")
    for r in known:
        layout = f"{r.resources.nodes} x {r.resources.gpus_per_node}"
        click.echo(f"{r.name:<16} {r.method:<7} {layout:<13} {r.description}")
