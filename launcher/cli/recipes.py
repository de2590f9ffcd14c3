"""cookbook recipes"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from launcher import site as sites
from launcher import yamlfile
from launcher.cli.common import cluster_option
from launcher.recipes import explain
from launcher.recipes import recipe as recipe_file
from launcher.sizing import gpus
from launcher.sizing.estimate import peak_gib


@click.command()
@click.argument("name", required=False)
@click.option("--key", metavar="KEY", help="Explain a key of a recipe: dataset.packed.")
@click.option("--json", "as_json", is_flag=True, help="Print for a program to read.")
@cluster_option
def recipes(name: str | None, key: str | None, as_json: bool, cluster: str | None) -> None:
    """List the recipes, or show NAME with everything resolved, or explain a KEY."""
    if key is not None:
        found = explain.key(key)
        click.echo(json.dumps(found, indent=1) if as_json else "\n".join(explain.lines(found)))
        return
    root = sites.load(cluster).root
    if name is not None:
        shown = recipe_file.load(name).resolved(root, "RUN_DIRECTORY")
        click.echo(json.dumps(shown, indent=1) if as_json else yamlfile.dump(shown), nl=as_json)
        return
    rows = [_row(recipe_file.load(each), root) for each in recipe_file.names()]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    width = max(len(row["name"]) for row in rows)
    click.echo(f"{'RECIPE':<{width}}  METHOD  NODES x GPUS  MEMORY PER GPU  ON       DESCRIPTION")
    for row in rows:
        layout = f"{row['nodes']} x {row['gpus_per_node']}"
        memory = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f} GiB"
        click.echo(
            f"{row['name']:<{width}}  {row['method']:<7} {layout:<13} {memory:>14}  "
            f"{row['smallest_gpu'] or '-':<8} {row['description']}"
        )
    click.echo(
        "Memory is computed, not measured; cookbook estimate NAME shows the terms. ON is the "
        "smallest kind of GPU that has it."
    )


def _row(recipe: recipe_file.Recipe, root: Path) -> dict[str, Any]:
    """What the table says of a recipe; memory is None if the kit cannot compute it."""
    peak = peak_gib(recipe, root) if recipe.entry.can_estimate else None
    return {
        "name": recipe.name,
        "method": recipe.method,
        "nodes": recipe.resources.nodes,
        "gpus_per_node": recipe.resources.gpus_per_node,
        "peak_gib": None if peak is None else round(peak, 2),
        "smallest_gpu": None if peak is None else gpus.smallest(peak),
        "model": (recipe.config.get("hub") or {}).get("model"),
        "description": recipe.description,
    }
