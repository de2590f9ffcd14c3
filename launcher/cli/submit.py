"""cookbook submit"""

import sys

import click

from launcher import executors
from launcher import site as sites
from launcher.checks import preflight
from launcher.cli import common
from launcher.cli.common import note
from launcher.cli.runs import interruption_told
from launcher.cli.status import watch_to_the_end
from launcher.recipes import recipe as recipe_file
from launcher.runs.directory import Run
from launcher.workflows import registered
from launcher.workflows import submit as workflow


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
@common.on_nodes_option
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
    on_nodes: tuple[str, ...],
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
    executor = executors.choose(local)
    recipe = sites.complete(recipe.profiled() if profile else recipe, site, executor)
    recipe = registered.in_recipe(recipe, site)
    for line in recipe.notes:
        note(f"note: {line}")
    planned = workflow.plan(recipe, site, name)
    checked = workflow.context(planned, executor, on_nodes)
    if dry_run:
        click.echo(planned.script, nl=False)
        for fault in preflight.faults(checked, no_check, quick=True):
            note(f"warning: submit would refuse this: {fault}")
        note(f"the trainer was not asked; all checks: cookbook check {recipe.given_name}")
        return
    with interruption_told(Run(planned.path)):
        run = workflow.submit(planned, checked, note, no_check)
    common.tell_submitted(run, as_json)
    if not as_json and not watch:
        click.echo(f"  follow it  cookbook watch {run.name}   or   cookbook logs -f {run.name}")
    if watch:
        sys.exit(watch_to_the_end(run))
