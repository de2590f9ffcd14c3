"""cookbook prepare and cookbook data"""

import json
import sys
from typing import Any

import click

from launcher import site as sites
from launcher.cli.common import cluster_option, flag, json_option, note, tell_submitted
from launcher.errors import UsageFault
from launcher.plugins import hook
from launcher.slurm import executors
from runspec import files

_RESOURCES = ("time", "partition", "account", "qos", "mem")


class _Prepare(click.Command):
    """The command has a second form, whose options are others."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **more: Any,
    ) -> click.Context:
        # The hook of a plug-in that logs requests: the command that makes a recipe of them.
        from_requests: Any = hook("from_requests") if args[:1] == ["from-requests"] else None
        if from_requests:
            name = f"{info_name} {args[0]}"
            made: click.Context = from_requests.make_context(name, args[1:], parent, **more)
            return made
        return super().make_context(info_name, args, parent, **more)


@click.command(cls=_Prepare)
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    help="Run in a job: 1 with DuckDB, more with Spark. [default: here, with DuckDB]",
)
@click.option("--name", metavar="NAME", help="Name of the training set. [default: the recipe]")
@click.option("--preview", is_flag=True, help="Show each step on the first rows; write nothing.")
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    help="Rows of each source in a preview. [default: 1000]",
)
@flag("--dry-run", help="Print the plan, or the job script; run nothing.")
@flag("--watch", help="Follow the job to its end.")
@flag("--local", help="Run the job script on this host, without Slurm.")
@click.option("--time", metavar="LIMIT", help="Time limit of the job.")
@click.option("--mem", metavar="SIZE", help="Memory of each node of the job: 64G.")
@click.option("--partition", metavar="NAME", help="Slurm partition.")
@click.option("--account", metavar="NAME", help="Slurm account.")
@click.option("--qos", metavar="NAME", help="Slurm quality of service.")
@json_option
@cluster_option
def prepare(
    recipe: str,
    overrides: tuple[str, ...],
    nodes: int | None,
    name: str | None,
    preview: bool,
    rows: int | None,
    dry_run: bool,
    watch: bool,
    local: bool,
    as_json: bool,
    cluster: str | None,
    **resources: Any,
) -> None:
    """Make a training set from raw data with a data RECIPE: clean, split and traceable.

    RECIPE is a name in configs/data or the path of a YAML file. KEY=VALUE overrides a key:
    sources.0.path=/shared/raw/*.jsonl, steps.0.filter='quality >= 0.9'. Train on the result with:
    cookbook submit --recipe NAME dataset=prepared:RECIPE@train

    cookbook prepare from-requests NAME makes a RECIPE from the requests to the endpoint NAME.
    """
    # Imported late: only this command needs them.
    from plugins.data.launcher import prepare_data as workflow
    from plugins.data.launcher import recipe as data_recipe

    site = sites.load(cluster)
    asked = {key: resources[key] for key in _RESOURCES if resources[key] is not None}
    if local and nodes is None:
        raise UsageFault("--local runs a job script: add --nodes 1, or leave it out")
    if nodes is None and (asked or watch):
        options = ", ".join(f"--{key}" for key in [*asked, *(["watch"] if watch else [])])
        raise UsageFault(
            f"{options}: without --nodes no job is submitted: add --nodes 1, or leave it out"
        )
    if rows is not None and not preview:
        raise UsageFault("--rows requires --preview: add --preview, or leave it out")
    if preview and nodes is not None:
        raise UsageFault("--preview runs on this host: leave --nodes out")
    loaded = data_recipe.load(recipe, overrides, asked)
    planned = workflow.plan(loaded, site, name, nodes)
    if nodes is None:
        if dry_run:
            click.echo("\n".join(workflow.described(planned)))
            return
        workflow.here(planned, (rows or 1000) if preview else None, as_json)
    path, contents = workflow.job_plan(planned)
    if dry_run:
        click.echo(contents[files.JOB_SCRIPT], nl=False)
        return
    run = workflow.submit(planned, path, contents, executors.choose(local))
    tell_submitted(run, as_json)
    if watch:
        from launcher.cli.status import watch_to_the_end

        sys.exit(watch_to_the_end(run))


@click.group()
def data() -> None:
    """Show prepared training sets."""


@data.command()
@click.argument("name", required=False)
@click.option("--row", type=int, metavar="ID", help="Show the source record of a row.")
@json_option
@cluster_option
def show(name: str | None, row: int | None, as_json: bool, cluster: str | None) -> None:
    """List the prepared sets, or show the splits, steps and inputs of NAME or NAME@VERSION."""
    from plugins.data.launcher import prepared

    root = sites.load(cluster).root
    if name is None:
        if row is not None:
            raise UsageFault("--row needs NAME: give the name of the set")
        sets = prepared.every(root)
        if as_json:
            click.echo(json.dumps(sets, indent=1))
        elif sets:
            click.echo("\n".join(prepared.table(sets)))
        else:
            note("there is no prepared set yet; make one with: cookbook prepare NAME")
        return
    one = prepared.find(root, name)
    if row is not None:
        click.echo(prepared.origin(one, row))
    elif as_json:
        click.echo(json.dumps({**one.card, "lineage": one.lineage}, indent=1))
    else:
        click.echo("\n".join(prepared.story(one)))
