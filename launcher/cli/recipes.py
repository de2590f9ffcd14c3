"""cookbook recipes"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from launcher import cluster as clusters
from launcher import estimate as estimates
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
    root = clusters.load(cluster).root
    known = [recipe_file.load(each) for each in recipe_file.names()]
    rows = [_row(recipe, root) for recipe in known]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    width = max(len(row["name"]) for row in rows)
    click.echo(f"{'RECIPE':<{width}}  METHOD  NODES x GPUS  MEMORY A GPU  ON       DESCRIPTION")
    for row in rows:
        layout = f"{row['nodes']} x {row['gpus_per_node']}"
        memory = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f} GiB"
        click.echo(
            f"{row['name']:<{width}}  {row['method']:<7} {layout:<13} {memory:>12}  "
            f"{row['smallest_gpu'] or '-':<8} {row['description']}"
        )
    click.echo(
        "memory is computed, not measured (cookbook estimate NAME tells of what); ON is the "
        "smallest kind of GPU that has it"
    )


def _row(recipe: recipe_file.Recipe, root: Path) -> dict[str, Any]:
    """What the table says of a recipe; memory is None where only a script of its own knows."""
    peak = estimates.peak_gib(recipe, root) if recipe.entry == "sft" else None
    return {
        "name": recipe.name,
        "method": recipe.method,
        "nodes": recipe.resources.nodes,
        "gpus_per_node": recipe.resources.gpus_per_node,
        "peak_gib": None if peak is None else round(peak, 2),
        "smallest_gpu": None if peak is None else estimates.smallest_gpu(peak),
        "model": (recipe.config.get("hub") or {}).get("model"),
        "description": recipe.description,
    }
