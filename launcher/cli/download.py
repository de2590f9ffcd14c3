"""cookbook download"""

from __future__ import annotations

import sys

import click

from launcher import hub
from launcher import site as sites
from launcher.cli.common import cluster_option, note, recipe_arguments
from launcher.cli.findings import show
from launcher.recipes import recipe as recipe_file


@click.command()
@recipe_arguments
@click.option("--revision", metavar="R", help="The model's branch, tag or commit. [default: main]")
@click.option(
    "--allow-pickle", is_flag=True, help="Take pickles too, which can run code when opened."
)
@click.option("--dry-run", is_flag=True, help="List the files and what is missing; fetch nothing.")
@click.option(
    "--json", "as_json", is_flag=True, help="With --dry-run: print for a program to read."
)
@cluster_option
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
    if as_json and not dry_run:
        raise click.UsageError("--json goes with --dry-run")
    recipe, site = recipe_file.load(recipe_name, overrides), sites.load(cluster)
    if not dry_run:
        for record in hub.download(recipe, site, revision, allow_pickle, note):
            click.echo(str(record))
        return
    repositories, findings = hub.check(recipe, site, revision, allow_pickle)
    files = [row for each in repositories for row in each.rows]
    failed = show(findings, as_json, files=files)
    for row in [] if as_json else files:
        state = "there" if row["there"] else "missing"
        click.echo(f"{state:<8} {row['size'] / 2**20:>10,.2f} MiB  {row['path']}")
    sys.exit(1 if failed else 0)
