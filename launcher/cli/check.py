"""cookbook check, doctor and download: what they find, as a list."""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import click

from launcher import site as sites
from launcher.checks import Finding, preflight
from launcher.checks import doctor as examination
from launcher.checks.doctor.ask import Options
from launcher.checks.doctor.nodes import table
from launcher.cli import common
from launcher.cli.common import note
from launcher.recipes import recipe as recipe_file
from launcher.workflows import registered
from launcher.workflows.submit import context, plan


@click.command()
@common.recipe_arguments
@common.resource_options
@common.flag("--local", help="Check for submit --local: Slurm is not asked.")
@common.on_nodes_option
@common.json_option
@common.cluster_option
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
    recipe = registered.in_recipe(recipe, site)
    for line in recipe.notes:
        note(f"note: {line}")
    failed = _show(preflight.check(context(plan(recipe, site), local, on_nodes)), as_json)
    if not as_json:
        faults = f"{failed} fault{'s' * (failed != 1)}: submit would refuse this run"
        click.echo(faults if failed else "no faults: submit would accept this run")
    sys.exit(1 if failed else 0)


@click.command()
@common.flag("--node-check", help="Ask every node of the partition, by one job.")
@click.option("--nodes", type=click.IntRange(min=1), help="With --node-check: this many of them.")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=1, max=3600),
    metavar="SECONDS",
    help="How long the job may wait to start. [default: 3; with --node-check 60]",
)
@common.json_option
@common.cluster_option
def doctor(
    node_check: bool, nodes: int | None, wait_s: float | None, as_json: bool, cluster: str | None
) -> None:
    """Check if this site can run the kit; each finding that is not ok comes with its remedy.

    Ends with status 1 if a check failed.
    """
    if nodes and not node_check:
        raise click.UsageError("--nodes goes with --node-check")
    options = Options.node_check(nodes, wait_s) if node_check else Options(wait_s=wait_s or 3)
    if node_check:
        note("asking the nodes; this takes about a minute once they are free")
    findings, nodes_asked = examination.examine(sites.load(cluster), options)
    failed = _show(findings, as_json, nodes=nodes_asked)
    if nodes_asked and not as_json:
        click.echo("\n".join(["", *table(nodes_asked)]))
    sys.exit(1 if failed else 0)


@click.command()
@common.recipe_arguments
@click.option("--revision", metavar="R", help="The model's branch, tag or commit. [default: main]")
@common.flag("--allow-pickle", help="Take pickles too, which can run code when opened.")
@common.flag("--dry-run", help="List the files and what is missing; fetch nothing.")
@common.flag("--json", "as_json", help="With --dry-run: print for a program to read.")
@common.cluster_option
def download(
    recipe_name: str,
    overrides: tuple[str, ...],
    revision: str | None,
    allow_pickle: bool,
    dry_run: bool,
    as_json: bool,
    cluster: str | None,
) -> None:
    """Fetch a recipe's model and dataset to the shared folder, and verify every file.

    Called again it keeps complete files and fetches the rest. KEY=VALUE replaces any key of the
    recipe, such as hub.model=ORGANISATION/NAME.
    """
    # Imported late: the hub's client takes a while.
    from launcher import hub

    if as_json and not dry_run:
        raise click.UsageError("--json goes with --dry-run")
    recipe, site = recipe_file.load(recipe_name, overrides), sites.load(cluster)
    if not dry_run:
        for record in hub.download(recipe, site, revision, allow_pickle, note):
            click.echo(str(record))
        return
    repositories, findings = hub.check(recipe, site, revision, allow_pickle)
    files = [row for each in repositories for row in each.rows]
    failed = _show(findings, as_json, files=files)
    for row in [] if as_json else files:
        state = "there" if row["there"] else "missing"
        click.echo(f"{state:<8} {row['size'] / 2**20:>10,.2f} MiB  {row['path']}")
    sys.exit(1 if failed else 0)


def _show(findings: Iterable[Finding], as_json: bool, **more: Any) -> int:
    """Print findings, as they come, as one aligned list; return how many of them failed.

    as_json: print one object with the findings and what else is given.
    """
    shown = []
    for finding in findings:
        shown.append(finding)
        if not as_json:
            click.echo(f"{finding.state:<8} {finding.subject:<19} {finding.line}")
    if as_json:
        click.echo(json.dumps({"findings": list(map(asdict, shown)), **more}, indent=1))
    return sum(each.state == "failed" for each in shown)
