"""cookbook submit"""

import sys

import click

from launcher import site as sites
from launcher.cli import common
from launcher.cli.common import note
from launcher.cli.runs import launched
from launcher.cli.status import watch_to_the_end
from launcher.do import submit as workflow
from launcher.recipe import load as recipe_file
from launcher.slurm import executors


@click.command()
@common.recipe_arguments
@common.own_options
@common.resource_options
@common.flag("--profile", help="Record profiler traces for TensorBoard.")
@click.option(
    "--name",
    metavar="LABEL",
    help="Name of the job and part of the run's name. [default: the recipe]",
)
@common.flag("--dry-run", help="Print the job script and submit nothing.")
@common.flag("--watch", help="Follow the run to its end.")
@common.flag("--local", help="Run the same job script on this host, without Slurm.")
@common.flag("--no-check", help="Skip the checks that can be skipped.")
@common.json_option
@common.cluster_option
def submit(
    recipe_name: str,
    data: str | None,
    model: str | None,
    profile: bool,
    name: str | None,
    dry_run: bool,
    watch: bool,
    local: bool,
    no_check: bool,
    as_json: bool,
    cluster: str | None,
    overrides: tuple[str, ...],
    **resources: str | int | None,
) -> None:
    """Render a recipe's job script, check it and submit it.

    KEY=VALUE overrides any key of the recipe: optimizer.lr=1e-4, epochs=2;
    +KEY=VALUE adds one, ~KEY removes one.
    """
    site = sites.load(cluster)
    recipe = recipe_file.load(recipe_name, overrides, resources, data, model)
    recipe = recipe.profiled() if profile else recipe
    for line in recipe.notes:
        note(f"note: {line}")
    planned = workflow.plan(recipe, site, executors.choose(local), name)
    run = launched(planned, "submit", dry_run, no_check)
    if run is None:
        note(f"--dry-run makes only quick checks; all checks: cookbook check {recipe.given_name}")
        return
    common.tell_submitted(run, as_json)
    if not as_json and not watch:
        click.echo(f"  follow it  cookbook watch {run.name}   or   cookbook logs -f {run.name}")
    if watch:
        sys.exit(watch_to_the_end(run))
