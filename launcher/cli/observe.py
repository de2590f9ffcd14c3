"""cookbook logs and tensorboard: what runs wrote."""

import sys

import click

from launcher.cli.common import cluster_option, flag, note, runs_root
from launcher.errors import UnknownRun, UsageFault
from launcher.look import logs as log_files
from launcher.look import servers
from launcher.look import tensorboard as server
from launcher.look.first_error import first_error as first_failure
from launcher.look.lines import read, tail_start
from launcher.look.text import plain
from launcher.run.directory import Run
from launcher.run.find import every, find, none_yet
from launcher.run.sweeps import runs_of

_COUNT = click.IntRange(min=0)


@click.command()
@click.argument("run", default="last")
@click.option(
    "--node", "nodes", multiple=True, metavar="N", help="Logs of a node's ranks: 1, n2, all."
)
@click.option("--rank", "ranks", multiple=True, metavar="N", help="Logs of ranks: 3, 0-3,8, all.")
@flag("--job", help="Also the job script's log.")
@click.option("--attempt", type=_COUNT, help="An earlier attempt. [default: the newest]")
@click.option(
    "--tail",
    metavar="N",
    help=f"The last N lines, or all. [default: all; {log_files.TAIL_LINES:,} of more than 1 MiB]",
)
@flag("--first-error", help="Show the first failure: its rank, and the last lines of its log.")
@flag("-f", "--follow", help="Show new lines as they are written, until the run ends.")
@cluster_option
def logs(
    run: str,
    nodes: tuple[str, ...],
    ranks: tuple[str, ...],
    job: bool,
    attempt: int | None,
    tail: str | None,
    first_error: bool,
    follow: bool,
    cluster: str | None,
) -> None:
    """Show the logs of RUN: by default the first node's, in the newest attempt.

    Of several logs one comes after another, and each line shows its origin. The first node is 0.
    """
    chosen, count = find(runs_root(cluster), run), _tail(tail)
    if first_error:
        _show_first_error(chosen, attempt, 30 if count is None else count)
        return
    wanted = log_files.Wanted(ranks, nodes, job, attempt)
    if follow:
        try:
            for line in log_files.follow(chosen, wanted, count):
                _print(line)
        except KeyboardInterrupt:
            note("")
        return
    sources = log_files.choose(chosen, wanted)
    for source in sources:
        note(f"==> {source.path} <==")
    if tail is None and log_files.is_long(sources):
        count = log_files.TAIL_LINES
        size = sum(source.size() for source in sources) / 2**20
        note(f"the last {count:,} lines of {size:,.0f} MiB; for the rest use --tail all")
    try:
        for line in log_files.show(sources, count):
            _print(line)
    except KeyboardInterrupt:
        note("")


def _tail(text: str | None) -> int | None:
    if text is None or text == "all":
        return None
    if not text.isdigit():
        raise UsageFault(f"--tail {text}: write a number of lines, or all")
    return int(text)


def _print(line: str) -> None:
    """Print a log's line; a terminal gets nothing that it would obey."""
    # A progress bar writes over itself: only what it wrote last would be seen.
    click.echo(plain(line.rpartition("\r")[2]) if sys.stdout.isatty() else line)


def _show_first_error(run: Run, attempt: int | None, count: int) -> None:
    error = first_failure(run, attempt)
    if error is None:
        note(f"no attempt of {run.name} has failed; see its state with: cookbook status {run.name}")
        return
    message, log = error
    click.echo(plain(message))
    click.echo(f"==> {log}, the last {count} lines <==")
    for line in read(log, tail_start(log, count)):
        _print(line)


@click.command()
@click.argument("wanted", nargs=-1, metavar="[RUN|SWEEP]...")
@click.option(
    "--port",
    type=click.IntRange(1024, 65535),
    help="Port on 127.0.0.1. [default: the first free from 6006]",
)
@cluster_option
def tensorboard(wanted: tuple[str, ...], port: int | None, cluster: str | None) -> None:
    """Serve the curves and traces of all runs, or of each RUN, on 127.0.0.1."""
    root = runs_root(cluster)
    chosen = runs_of(root.parent, wanted) if wanted else every(root)
    if not chosen:
        raise UnknownRun(none_yet(root))
    port = servers.free_port(port, server.PORTS)
    sys.exit(server.serve(chosen, port, note))
