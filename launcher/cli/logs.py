"""cookbook logs"""

from __future__ import annotations

import click

from launcher.cli.common import cluster_option, note, runs_root
from launcher.observe import logs as log_files
from launcher.runs.find import find


@click.command()
@click.argument("run", default="last")
@click.option(
    "--node", type=click.IntRange(min=0), help="All ranks of this node; the first node is 0."
)
@click.option("--rank", type=click.IntRange(min=0), help="Only this rank.")
@click.option(
    "--attempt", type=click.IntRange(min=0), help="An earlier attempt. [default: the newest]"
)
@click.option(
    "-f", "--follow", is_flag=True, help="Show new lines as they come, until the run has ended."
)
@cluster_option
def logs(
    run: str,
    node: int | None,
    rank: int | None,
    attempt: int | None,
    follow: bool,
    cluster: str | None,
) -> None:
    """Show the logs of RUN: by default the first node's, in the newest attempt."""
    found = find(runs_root(cluster), run)
    if follow:
        try:
            for line in log_files.follow(found, node, rank, attempt):
                click.echo(line)
        except KeyboardInterrupt:
            note("")
        return
    path = log_files.choose(found, node, rank, attempt)
    note(f"==> {path} <==")
    for line in log_files.lines(path):
        click.echo(line)
