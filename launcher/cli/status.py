"""cookbook status and watch"""

import json
import os
import shutil
import sys

import click

from launcher.cli.common import cluster_option, flag, json_option, note, runs_root
from launcher.errors import UsageFault
from launcher.observe.status import chosen, row, table
from launcher.observe.status import since as since_time
from launcher.observe.summary import story, summary
from launcher.observe.text import plain
from launcher.observe.watch import watch as watch_run
from launcher.runs.directory import Run
from launcher.runs.find import every, find, foreign, none_yet
from launcher.runs.states import judged

_NEWEST = 20


@click.command()
@click.argument("run", required=False)
@flag("--all", "show_all", help=f"All runs, not only the newest {_NEWEST}.")
@click.option("--state", "wanted", multiple=True, metavar="STATE", help="Runs in this state.")
@click.option("--recipe", multiple=True, metavar="NAME", help="Runs of this recipe; * is any text.")
@click.option("--since", metavar="TIME", help="Runs made since then: 90m, 12h, 3d, 2026-01-31.")
@json_option
@cluster_option
def status(
    run: str | None,
    show_all: bool,
    wanted: tuple[str, ...],
    recipe: tuple[str, ...],
    since: str | None,
    as_json: bool,
    cluster: str | None,
) -> None:
    """Show the newest runs, or the whole story of one RUN.

    RUN is a name, a unique part of it, a job id, or last. --state and --recipe may be given more
    than once.
    """
    root = runs_root(cluster)
    if run is not None:
        if wanted or recipe or since or show_all:
            raise UsageFault("RUN is one run: leave out --all, --state, --recipe and --since")
        ((one, state),) = judged([find(root, run)])
        if as_json:
            click.echo(json.dumps(row(one, state), indent=1))
        else:
            click.echo("\n".join(story(one, state)))
        return
    runs, newer_than = every(root), since_time(since) if since else ""
    limit = None if show_all else _NEWEST
    rows, torn = chosen(runs, limit, wanted, recipe, newer_than)
    if as_json:
        click.echo(json.dumps(rows, indent=1))
    elif rows:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        click.echo("\n".join(table(rows, width, _paint if _colours() else None)))
    else:
        note("no run is as you ask" if runs else none_yet(root))
    if limit is not None and len(rows) == limit < len(runs):
        note(f"the newest {limit} of {len(runs)} runs; more: cookbook status --all")
    if names := [plain(name) for name in (*foreign(root), *torn)]:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        note(f"passed over in {root}, because it is no run: {', '.join(names[:3])}{more}")


def _colours() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _paint(text: str, colour: str) -> str:
    return click.style(text, fg=colour or None)


@click.command()
@click.argument("run", default="last")
@cluster_option
def watch(run: str, cluster: str | None) -> None:
    """Follow RUN to its end; Ctrl-C stops watching, not the run."""
    sys.exit(watch_to_the_end(find(runs_root(cluster), run)))


def watch_to_the_end(run: Run) -> int:
    """Follow a run and print its results; return the exit status, 0 for a completed run."""
    try:
        state = watch_run(run, note)
    except KeyboardInterrupt:
        note(f"\nstopped watching; the run continues; follow it with: cookbook watch {run.name}")
        return 130
    for line in summary(run, state):
        click.echo(line)
    return 0 if state.word == "COMPLETED" else 1
