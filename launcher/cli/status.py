"""cookbook status and watch"""

import json
import os
import shutil
import sys

import click

from launcher import site as sites
from launcher.cli.common import (
    cluster_option,
    colours,
    flag,
    json_option,
    note,
    runs_root,
)
from launcher.errors import UsageFault
from launcher.look.status import Row, chosen, row, table
from launcher.look.summary import story, summary
from launcher.look.watch import watch_all
from launcher.plugins import hooks
from launcher.run.directory import Run
from launcher.run.find import every, none_yet
from launcher.run.states import judged
from launcher.run.sweeps import runs_of

_NEWEST = 20


@click.command()
@click.argument("run", required=False)
@flag("--all", "show_all", help=f"All runs, not only the newest {_NEWEST}.")
@json_option
@cluster_option
def status(run: str | None, show_all: bool, as_json: bool, cluster: str | None) -> None:
    """Show the newest runs, or the details of one RUN.

    RUN is a name, a unique part of it, a job id, or last. The name of a sweep lists its runs.
    """
    root = runs_root(cluster)
    if run is not None:
        if show_all:
            raise UsageFault("RUN is one run: leave out --all")
        named = runs_of(sites.load(cluster).root, [run])
        if len(named) > 1:
            _show(chosen(named), as_json)
            return
        ((one, state),) = judged(named)
        if as_json:
            click.echo(json.dumps(row(one, state), indent=1))
        else:
            click.echo("\n".join(story(one, state)))
        return
    runs = every(root)
    limit = None if show_all else _NEWEST
    rows = chosen(runs, limit)
    if rows or as_json:
        _show(rows, as_json)
    else:
        note(none_yet(root))
    if limit is not None and len(rows) == limit < len(runs):
        note(f"the newest {limit} of {len(runs)} runs; more: cookbook status --all")


def _show(rows: list[Row], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    click.echo("\n".join(table(rows, width, _paint if colours() else None)))


def _paint(text: str, colour: str) -> str:
    return click.style(text, fg=colour or None)


@click.command()
@click.argument("wanted", nargs=-1, metavar="[RUN|SWEEP]...")
@flag("--plain", help="Print lines instead of the live view, as in a pipe.")
@cluster_option
def watch(wanted: tuple[str, ...], plain: bool, cluster: str | None) -> None:
    """Follow each RUN to its end; Ctrl-C stops watching, not the run."""
    runs = runs_of(sites.load(cluster).root, wanted or ("last",))
    sys.exit(watch_to_the_end(*runs, live=sys.stdout.isatty() and not plain))


def watch_to_the_end(*runs: Run, live: bool = False) -> int:
    """Follow runs and print their results; return the exit status, 0 if all are completed."""
    try:
        if live and os.environ.get("TERM") != "dumb":
            # Imported late: rich takes longer than the rest of the command.
            from launcher.look.live import watch_live

            states = watch_live(runs)
        else:
            states = watch_all(runs, note)
    except KeyboardInterrupt:
        names = " ".join(run.name for run in runs)
        which = "the run continues" if len(runs) == 1 else "the runs continue"
        note(f"\nstopped watching; {which}; follow it with: cookbook watch {names}")
        return 130
    for run, state in zip(runs, states, strict=True):
        for line in summary(run, state):
            click.echo(line)
    # A plug-in's "runs_ended" takes the runs, and a function that says a line on stderr.
    for runs_ended in hooks("runs_ended"):
        runs_ended(runs, note)
    return 0 if all(state.word == "COMPLETED" for state in states) else 1
