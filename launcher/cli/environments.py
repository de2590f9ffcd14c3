"""cookbook environments"""

import click

from launcher import site as sites
from launcher.cli import common
from launcher.recipe import environment


@click.command()
@common.cluster_option
def environments(cluster: str | None) -> None:
    """List the environments in configs/environments."""
    site = sites.load(cluster)
    named = [environment.Environment.of(environment.record(each)) for each in environment.names()]
    for each in named:
        default = " (default of this site)" * (each.name == site.default_environment)
        click.echo(f"{each.name:<16}  {each.kind:<9}  {each.description or ''}{default}")
    if not named:
        click.echo("no environments yet: the kit's own virtual environment is used")
