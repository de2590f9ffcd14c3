"""cookbook profile"""

import json

import click

from launcher.cli import completion
from launcher.cli.common import cluster_option, json_option, note, runs_root
from launcher.cli.number import IntRange
from launcher.look import profile as profiles
from launcher.look.outcome import resolved
from launcher.run.find import find


@click.command()
@click.argument("run", default="last", shell_complete=completion.runs)
@click.option(
    "--top", type=IntRange(min=1), default=8, show_default=True, help="Number of operators."
)
@json_option
@cluster_option
def profile(run: str, top: int, as_json: bool, cluster: str | None) -> None:
    """Show where the time of RUN's profiled steps goes, and what to try.

    Record the traces with: cookbook submit RECIPE --profile
    """
    chosen = find(runs_root(cluster), run)
    times, faults = profiles.ranks(chosen)
    for fault in faults:
        note(f"skipped: {fault}")
    config = resolved(chosen)
    if as_json:
        click.echo(json.dumps(profiles.as_json(chosen, times, config), indent=1))
    else:
        click.echo("\n".join(profiles.lines(chosen, times, config, top)))
