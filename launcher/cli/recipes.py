"""cookbook recipes"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from launcher import gpus, yamlfile
from launcher import site as sites
from launcher.cli.common import cluster_option, note
from launcher.errors import RecipeFault
from launcher.recipe import load as recipe_file
from launcher.recipe.model import Recipe
from launcher.recipe.needs import needs


@click.command()
@click.argument("name", required=False)
@cluster_option
def recipes(name: str | None, cluster: str | None) -> None:
    """List the recipes, or show NAME with all settings resolved."""
    root = sites.load(cluster).root
    if name is not None:
        resolved = recipe_file.load(name).resolved(root, "RUN_DIRECTORY")
        click.echo(yamlfile.dump(resolved), nl=False)
    else:
        click.echo("\n".join(_table(list(_rows(root)))))


def _rows(root: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the recipes that can be read; the faults of others go to standard error."""
    for name in recipe_file.names():
        try:
            yield _row(recipe_file.load(name), root)
        except RecipeFault as error:
            for fault in error.faults:
                note(f"{name} is left out: {fault}")


def _row(recipe: Recipe, root: Path) -> dict[str, Any]:
    """What the table says of a recipe; memory is None if nothing computes it."""
    resources, found = recipe.resources, None
    if recipe.entry.method:
        config = recipe.resolved(root, "run")
        found = needs(config, resources.nodes, resources.gpus_per_node)
    peak = None if found is None else found.peak_gib
    return {
        "name": recipe.name,
        "method": recipe.method,
        "nodes": resources.nodes,
        "gpus_per_node": resources.gpus_per_node,
        "peak_gib": None if peak is None else round(peak, 2),
        "smallest_gpu": None if peak is None else gpus.smallest(peak),
        "description": recipe.description,
    }


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    width = max(len(row["name"]) for row in rows)
    yield f"{'RECIPE':<{width}}  METHOD  NODES x GPUS  MEMORY PER GPU  ON       DESCRIPTION"
    for row in rows:
        layout = f"{row['nodes']} x {row['gpus_per_node']}"
        memory = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f} GiB"
        yield (
            f"{row['name']:<{width}}  {row['method']:<7} {layout:<13} {memory:>14}  "
            f"{row['smallest_gpu'] or '-':<8} {row['description']}"
        )
    if any(row["peak_gib"] for row in rows):
        yield (
            "Memory is computed, not measured; cookbook estimate NAME shows the terms. ON is the "
            "smallest GPU type with enough memory."
        )
