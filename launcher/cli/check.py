"""cookbook check"""

from __future__ import annotations

import sys

import click

from launcher import site as sites
from launcher.checks import preflight
from launcher.cli.common import (
    cluster_option,
    note,
    on_nodes_option,
    recipe_arguments,
    resource_options,
)
from launcher.cli.findings import show
from launcher.recipes import recipe as recipe_file
from launcher.workflows.submit import context, plan


@click.command()
@recipe_arguments
@resource_options
@click.option("--local", is_flag=True, help="Check for submit --local: Slurm is not asked.")
@on_nodes_option
@click.option("--json", "as_json", is_flag=True, help="Print for a program to read.")
@cluster_option
def check(
    recipe_name: str,
    local: bool,
    on_nodes: tuple[str, ...],
    as_json: bool,
    cluster: str | None,
    overrides: tuple[str, ...],
    **resources: str | int | None,
) -> None:
    """Check everything that could stop a recipe's run, without queueing it.

    Ends with status 1 if a check fails. submit makes the same checks first.
    """
    site = sites.load(cluster)
    recipe = sites.complete(recipe_file.load(recipe_name, overrides, resources), site, local)
    for line in recipe.notes:
        note(f"note: {line}")
    failed = show(preflight.check(context(plan(recipe, site), local, on_nodes)), as_json)
    if not as_json:
        faults = f"{failed} fault{'s' * (failed != 1)}: submit would refuse this run"
        click.echo(faults if failed else "no faults: submit would accept this run")
    sys.exit(1 if failed else 0)
