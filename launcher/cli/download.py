"""cookbook download"""

from __future__ import annotations

import click

from launcher import cluster as clusters
from launcher import hub
from launcher import recipe as recipe_file
from launcher.cli.common import cluster_option, note


@click.command()
@click.argument("recipe_name", metavar="NAME")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--revision", metavar="R", help="The model's branch, tag or commit. [default: main]")
@click.option(
    "--allow-pickle", is_flag=True, help="Take pickled weights too, which can run code when opened."
)
@cluster_option
def download(
    recipe_name: str,
    overrides: tuple[str, ...],
    revision: str | None,
    allow_pickle: bool,
    cluster: str | None,
) -> None:
    """Fetch the model and the dataset of recipe NAME to the shared folder, and check every file.

    Called again it keeps what is whole and fetches the rest. KEY=VALUE replaces any key of the
    recipe, such as hub.model=ORGANISATION/NAME.
    """
    recipe = recipe_file.load(recipe_name, overrides)
    for record in hub.download(recipe, clusters.load(cluster), revision, allow_pickle, note):
        click.echo(str(record))
