"""cookbook environments"""

import time

import click

from launcher import site as sites
from launcher.cli import common
from launcher.recipe import environment
from launcher.run import built


@click.command()
@common.cluster_option
def environments(cluster: str | None) -> None:
    """List the environments in configs/environments, and yours that were built.

    A built environment is shared by all your runs with the same dependencies. It is listed with its
    size, the time since its last use, and its runs. One without runs can be removed.
    """
    site = sites.load(cluster)
    named = [environment.Environment.of(environment.record(each)) for each in environment.names()]
    built_environments = built.listed(site.root)
    for each in named:
        default = " (default of this site)" * (each.name == site.default_environment)
        click.echo(f"{each.name:<16}  {each.kind:<9}  {each.description or ''}{default}")
    for one in built_environments:
        days = (time.time() - one.used) / 86400
        count = f"{len(one.runs)} run{'s' * (len(one.runs) != 1)}"
        last = f" (last {one.runs[-1]})" if one.runs else ""
        size = f"{one.size / 2**20:,.0f} MiB"
        click.echo(
            f"{one.path.name:<16}  {size:>9}  used {days:.1f} days ago by {count}{last}: "
            f"{', '.join(one.dependencies)}"
        )
    if not named and not built_environments:
        click.echo("no environments yet: the kit's own virtual environment is used")
