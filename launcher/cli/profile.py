"""cookbook profile"""

import click

from launcher.cli.common import cluster_option, runs_root
from launcher.look import profile as profiles
from launcher.run.find import find


@click.command()
@click.argument("run", default="last")
@click.option(
    "--top", type=click.IntRange(min=1), default=8, show_default=True, help="Number of operators."
)
@cluster_option
def profile(run: str, top: int, cluster: str | None) -> None:
    """Show the slowest operators of RUN's profiled steps.

    Record them with: cookbook submit RECIPE --profile. cookbook tensorboard shows computation and
    communication of each rank.
    """
    click.echo("\n".join(profiles.lines(find(runs_root(cluster), run), top)))
