"""cookbook logs and tensorboard: what runs wrote."""

import sys

import click

from launcher.cli.common import cluster_option, flag, note, runs_root
from launcher.errors import UnknownRun
from launcher.observe import logs as log_files
from launcher.observe import tensorboard as server
from launcher.runs.find import every, find, none_yet

_COUNT = click.IntRange(min=0)


@click.command()
@click.argument("run", default="last")
@click.option("--node", type=_COUNT, help="All ranks of this node; the first node is 0.")
@click.option("--rank", type=_COUNT, help="Only this rank.")
@click.option("--attempt", type=_COUNT, help="An earlier attempt. [default: the newest]")
@flag("-f", "--follow", help="Show new lines as they come, until the run has ended.")
@cluster_option
def logs(run: str, follow: bool, cluster: str | None, **chosen: int | None) -> None:
    """Show the logs of RUN: by default the first node's, in the newest attempt."""
    found = find(runs_root(cluster), run)
    if follow:
        try:
            for line in log_files.follow(found, **chosen):
                click.echo(line)
        except KeyboardInterrupt:
            note("")
        return
    path = log_files.choose(found, **chosen)
    note(f"==> {path} <==")
    for line in log_files.lines(path):
        click.echo(line)


@click.command()
@click.argument("wanted", nargs=-1, metavar="[RUN]...")
@click.option(
    "--port",
    type=click.IntRange(1024, 65535),
    help="Port on 127.0.0.1. [default: the first free from 6006]",
)
@cluster_option
def tensorboard(wanted: tuple[str, ...], port: int | None, cluster: str | None) -> None:
    """Serve the curves and traces of all runs, or of each RUN, on 127.0.0.1."""
    root = runs_root(cluster)
    chosen = [find(root, each) for each in wanted] if wanted else every(root)
    if not chosen:
        raise UnknownRun(none_yet(root))
    once = {run.name: run for run in chosen}
    sys.exit(server.serve(list(once.values()), server.free_port(port), note))
