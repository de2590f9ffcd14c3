"""cookbook status, watch, cancel and resume"""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from launcher import site as sites
from launcher.cli.common import (
    cluster_option,
    flag,
    json_option,
    note,
    on_nodes_option,
    resource_options,
    runs_root,
)
from launcher.errors import UsageFault
from launcher.executors import title
from launcher.observe.status import chosen, row, table
from launcher.observe.status import since as since_time
from launcher.observe.summary import story, summary
from launcher.observe.text import plain
from launcher.observe.watch import watch as watch_run
from launcher.runs.directory import Run
from launcher.runs.find import every, find, foreign, none_yet
from launcher.runs.states import judged
from launcher.workflows.cancel import cancel as cancel_run
from launcher.workflows.resume import Changes
from launcher.workflows.resume import resume as resume_run

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


@contextmanager
def interruption_told(run: Run) -> Iterator[None]:
    """After Ctrl-C, say what is queued of a run and end with status 130."""
    before = run.job_id
    try:
        yield
    except KeyboardInterrupt:
        if run.job_id != before:
            note(
                f"\ninterrupted, but {run.name} is queued as {title(run.job_id)}: follow it with: "
                f"cookbook watch {run.name}, or end it with: cookbook cancel {run.name}"
            )
        elif run.starting:
            note(
                f"\ninterrupted before Slurm answered, so {run.name} may be queued: look with: "
                f"cookbook status {run.name}"
            )
        else:
            note("\ninterrupted: no job was queued")
        sys.exit(130)


@click.command()
@click.argument("run")
@cluster_option
def cancel(run: str, cluster: str | None) -> None:
    """Cancel RUN: a name, a unique part of it, a job id, or last."""
    click.echo(cancel_run(find(runs_root(cluster), run)))


@click.command()
@click.argument("run")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@resource_options
@click.option("--local", is_flag=True, help="Continue on this host, without Slurm.")
@click.option("--watch", "follow", is_flag=True, help="Follow the run to its end.")
@click.option("--no-check", is_flag=True, help="Skip the checks of changes that can be skipped.")
@on_nodes_option
@cluster_option
def resume(
    run: str,
    overrides: tuple[str, ...],
    local: bool,
    follow: bool,
    no_check: bool,
    on_nodes: tuple[str, ...],
    cluster: str | None,
    **resources: str | int | None,
) -> None:
    """Start RUN again from its last complete checkpoint.

    Options and KEY=VALUE change how it goes on: other nodes, another layout, a new learning rate.
    cookbook recipes --key KEY says which keys may change.
    """
    found = find(runs_root(cluster), run)
    options = {key: value for key, value in resources.items() if value is not None}
    changes = None
    if overrides or options:
        site = sites.load(cluster or found.submission.get("site"))
        changes = Changes(site, overrides, options, on_nodes, no_check)
    with interruption_told(found):
        resume_run(found, local, changes, note)
    click.echo(f"resumed {found.name} as {title(found.job_id)}")
    if follow:
        sys.exit(watch_to_the_end(found))
