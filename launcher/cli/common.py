"""Options and arguments of several commands."""

import json
import os
import sys
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher import site as sites
from launcher.run import directory
from launcher.slurm.executors import title

if TYPE_CHECKING:
    from launcher.run.directory import Run

Command = Callable[..., Any]


flag = partial(click.option, is_flag=True)
json_option = flag("--json", "as_json", help="Print JSON.")
cluster_option = click.option(
    "--cluster",
    metavar="NAME",
    help="Site settings: configs/clusters/NAME.yaml. [default: default]",
)


def recipe_arguments(command: Command) -> Command:
    """Add [RECIPE] [KEY=VALUE]... and --recipe; the command gets recipe_name and overrides."""

    @wraps(command)
    def called(*args: Any, recipe: str | None, words: tuple[str, ...], **options: Any) -> Any:
        from launcher.recipe import override

        named = bool(words) and not override.is_override(words[0])
        if named == (recipe is not None):
            what = "is named twice: leave one out" if named else "is missing"
            give = "Give it as the first argument or with --recipe NAME; list them with"
            raise click.UsageError(f"The recipe {what}. {give}: cookbook recipes")
        name, overrides = (words[0], words[1:]) if named else (recipe, words)
        return command(*args, recipe_name=name, overrides=overrides, **options)

    called = click.argument("words", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...")(called)
    words = "Name of a recipe or of a torchtune config, or path of a YAML file."
    return click.option("--recipe", metavar="NAME", help=words)(called)


def own_options(command: Command) -> Command:
    """Add --data and --model, which take the place of the recipe's."""
    for name, metavar, text in (
        ("--model", "MODEL", "Your model: a folder, or ORGANISATION/NAME of the Hub."),
        ("--data", "FILE", "Your data: CSV, JSON lines, Parquet, or prepared:NAME@SPLIT."),
    ):
        command = click.option(name, metavar=metavar, help=text)(command)
    return command


def resource_options(command: Command) -> Command:
    """Add the most common requests to Slurm to a command."""
    number = click.IntRange(min=1)
    options = (
        ("--nodes", number, None, "Number of nodes."),
        ("--gpus-per-node", number, None, "GPUs per node, with one rank each."),
        ("--time", str, "LIMIT", "Time limit: 04:00:00, 90 (minutes), 2-00:00:00."),
        ("--partition", str, "NAME", "Slurm partition."),
        ("--account", str, "NAME", "Slurm account."),
        ("--qos", str, "NAME", "Slurm quality of service."),
        ("--environment", str, "NAME", "Environment: a file in configs/environments."),
    )
    for name, kind, metavar, text in reversed(options):
        command = click.option(name, type=kind, metavar=metavar, help=text)(command)
    return command


def runs_root(cluster: str | None) -> Path:
    """Return the folder of this site's runs."""
    return directory.runs_root(sites.load(cluster).root)


def tell_submitted(run: "Run", as_json: bool, **more: str) -> None:
    """Print which run was started, as which job and where; more: what the JSON has besides."""
    if as_json:
        answer = {"run": run.name, "job_id": run.job_id, "path": str(run.path)}
        click.echo(json.dumps({**answer, **more}))
    else:
        click.echo(f"submitted {run.name} as {title(run.job_id)}")
        click.echo(f"  directory  {run.path}")


def colours() -> bool:
    """Whether to print colours: to a terminal, unless NO_COLOR is set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


# Prints what is no result.
note = partial(click.echo, err=True)
