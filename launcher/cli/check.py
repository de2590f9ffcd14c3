"""cookbook check, doctor and download: what they find, as a list."""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from itertools import chain, tee
from typing import Any

import click

from launcher import site as sites
from launcher.check import Finding, faults_of, preflight
from launcher.check import doctor as examination
from launcher.check.samples import read as read_samples
from launcher.cli import common
from launcher.cli.common import note
from launcher.cli.samples import lines as sample_lines
from launcher.do.submit import context, plan
from launcher.errors import UsageFault
from launcher.plugins import hook
from launcher.recipe import load as recipe_file
from launcher.slurm import executors


@click.command()
@common.recipe_arguments
@common.own_options
@common.resource_options
@common.flag("--local", help="Check for submit --local: Slurm is not queried.")
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    metavar="N",
    help="Also print the first N samples with their trained tokens marked, and count the tokens "
    "of the first 1,000.",
)
@common.json_option
@common.cluster_option
def check(
    recipe_name: str,
    data: str | None,
    model: str | None,
    local: bool,
    samples: int | None,
    as_json: bool,
    cluster: str | None,
    overrides: tuple[str, ...],
    **resources: str | int | None,
) -> None:
    """Check everything that could stop a recipe's run, without submitting it.

    The exit status is 1 if a check fails. submit runs the same checks first.
    """
    site = sites.load(cluster)
    recipe = recipe_file.load(recipe_name, overrides, resources, data, model)
    for line in recipe.notes:
        note(f"note: {line}")
    checked = context(plan(recipe, site, executors.choose(local)))
    # First, as the same start of the trainer answers for the components.
    sample_findings, shown = read_samples(checked, samples) if samples else ([], [])
    more = {"samples": shown} if samples else {}
    refusals, shown_first = tee(preflight.check(checked))
    failed = _show(chain(shown_first, sample_findings), as_json, **more)
    if not as_json:
        for line in ["", *sample_lines(shown, common.colours()), ""] if shown else []:
            click.echo(line)
        faults = f"{failed} fault{'s' * (failed != 1)}"
        if faults_of(refusals):
            click.echo(f"{faults}: submit would refuse this run")
        elif failed:
            click.echo(f"{faults} in the data: the run would end at its set-up")
        else:
            click.echo("no faults: submit would accept this run")
    sys.exit(1 if failed else 0)


@click.command()
@click.option(
    "--rehearse",
    metavar="RECIPE",
    help="Rehearse a recipe on one node in ten minutes: links, products, steps, resume, export.",
)
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=1, max=3600),
    metavar="SECONDS",
    help="How long the job may wait to start. [default: 3; with --rehearse 600]",
)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@common.json_option
@common.cluster_option
def doctor(
    rehearse: str | None,
    wait_s: float | None,
    overrides: tuple[str, ...],
    as_json: bool,
    cluster: str | None,
) -> None:
    """Check if this site can run the kit, and show a fix for each problem.

    The exit status is 1 if a check or a part of --rehearse fails. With --rehearse, KEY=VALUE
    overrides a key of the recipe.
    """
    if overrides and not rehearse:
        raise click.UsageError(f"{overrides[0]} requires --rehearse RECIPE")
    site = sites.load(cluster)
    if rehearse:
        # From the site, a recipe's name, overrides, seconds to wait and a function that says a line
        # to the folder of the logs, and the findings.
        rehearsed = hook("rehearse")
        if rehearsed is None:
            raise UsageFault("--rehearse: no plug-in that rehearses recipes is installed")
        folder, found = rehearsed(site, rehearse, overrides, wait_s or 600, note)
        failed = _show(found, as_json, folder=str(folder))
    else:
        failed = _show(examination.examine(site, wait_s or 3), as_json)
    sys.exit(1 if failed else 0)


@click.command()
@common.recipe_arguments
@common.own_options
@common.cluster_option
def download(
    recipe_name: str,
    data: str | None,
    model: str | None,
    overrides: tuple[str, ...],
    cluster: str | None,
) -> None:
    """Download a recipe's model and dataset to the shared folder, and verify every file.

    If run again, it keeps complete files and downloads the rest. KEY=VALUE overrides any key of
    the recipe, such as hub.model=ORGANISATION/NAME.
    """
    # Imported late: the hub's client takes a while.
    from launcher import hub

    recipe, site = recipe_file.load(recipe_name, overrides, None, data, model), sites.load(cluster)
    for record in hub.download(recipe, site, note):
        click.echo(str(record))


def _show(findings: Iterable[Finding], as_json: bool, **more: Any) -> int:
    """Print findings, as they come, as one aligned list; return how many of them failed.

    as_json: print one object with the findings and what else is given.
    """
    shown: list[Finding] = []
    # The data's faults are found both with and without --samples.
    for finding in findings:
        if finding in shown:
            continue
        shown.append(finding)
        if not as_json:
            click.echo(f"{finding.state:<8} {finding.subject:<19} {finding.line}")
    if as_json:
        click.echo(json.dumps({"findings": list(map(asdict, shown)), **more}, indent=1))
    return sum(each.state == "failed" for each in shown)
