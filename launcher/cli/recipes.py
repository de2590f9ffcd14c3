"""cookbook recipes and environments"""

from collections.abc import Iterator
from pathlib import Path

import click

from launcher import paths, yamlfile
from launcher import site as sites
from launcher.cli.common import cluster_option, note
from launcher.errors import RecipeFault
from launcher.recipe import environment
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
        return
    rows = [*_rows(root)]
    width = max(len(row[0]) for row in rows)
    heads = ("RECIPE", "METHOD", "NODES x GPUS", "MEMORY PER GPU", "DESCRIPTION")
    for title, method, layout, memory, description in (heads, *rows):
        click.echo(f"{title:<{width}}  {method:<7} {layout:<13} {memory:>14}  {description}")
    if any(row[3] != "-" for row in rows):
        click.echo("Memory is computed, not measured; cookbook estimate NAME shows the terms.")


@click.command()
@cluster_option
def environments(cluster: str | None) -> None:
    """List the environments in configs/environments."""
    site = sites.load(cluster)
    names = yamlfile.names(paths.ENVIRONMENTS)
    named = [environment.Environment.of(environment.record(each)) for each in names]
    for each in named:
        default = " (default of this site)" * (each.name == site.default_environment)
        click.echo(f"{each.name:<16}  {each.kind:<9}  {each.description or ''}{default}")
    if not named:
        click.echo("no environments yet: the kit's own virtual environment is used")


def _rows(root: Path) -> Iterator[tuple[str, ...]]:
    """Yield the cells of the recipes that can be read; the faults of others go to stderr."""
    for name in recipe_file.names():
        try:
            yield _row(recipe_file.load(name), root)
        except RecipeFault as error:
            for fault in error.faults:
                note(f"{name} is left out: {fault}")


def _row(recipe: Recipe, root: Path) -> tuple[str, ...]:
    """What the table says of a recipe; its memory is "-" if nothing computes it."""
    resources, found = recipe.resources, None
    if recipe.entry.method:
        config = recipe.resolved(root, "run")
        found = needs(config, resources.nodes, resources.gpus_per_node)
    memory = "-" if found is None else f"{found.peak_gib:.1f} GiB"
    layout = f"{resources.nodes} x {resources.gpus_per_node}"
    return recipe.name, recipe.method, layout, memory, recipe.description
