"""cookbook profile"""

import click

from launcher.cli.common import cluster_option, note, runs_root
from launcher.look import profile as profiles
from launcher.run.find import find


@click.command()
@click.argument("run", default="last")
@click.option(
    "--top", type=click.IntRange(min=1), default=8, show_default=True, help="Number of operators."
)
@cluster_option
def profile(run: str, top: int, cluster: str | None) -> None:
    """Show where the time of RUN's profiled steps goes.

    Record the traces with: cookbook submit RECIPE --profile
    """
    chosen = find(runs_root(cluster), run)
    times, faults = profiles.ranks(chosen)
    for fault in faults:
        note(f"skipped: {fault}")
    click.echo("\n".join(profiles.lines(chosen, times, top)))
