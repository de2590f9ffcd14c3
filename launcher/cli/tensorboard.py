"""cookbook tensorboard"""

from __future__ import annotations

import sys

import click

from launcher.cli.common import cluster_option, note, runs_root
from launcher.errors import UnknownRun
from launcher.observe import tensorboard as server
from launcher.runs.find import every, find, none_yet


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
    sys.exit(
        server.serve(list({run.name: run for run in chosen}.values()), server.free_port(port), note)
    )
