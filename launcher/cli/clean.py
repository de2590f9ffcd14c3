"""cookbook clean"""

import sys
from collections import defaultdict

import click

from launcher import site as sites
from launcher.cli import common
from launcher.do import clean as workflow


@click.command()
@common.flag("--yes", help="Remove them.")
@common.cluster_option
def clean(yes: bool, cluster: str | None) -> None:
    """List what can be removed without losing anything, with its size; --yes removes it.

    These are tokenised data that no run has used for a week, code and environments that no run
    uses, what killed commands left, and checkpoints that training has put aside as damaged. Runs,
    models and datasets stay, and while runs wait or run, so does tokenised data. A colleague's run
    that cannot be read counts as waiting until its directory has not changed for 30 days.
    """
    root = sites.load(cluster).root
    living = workflow.alive(root)
    items = workflow.find(root, living)
    kept = workflow.remove(items) if yes else []
    by_reason = defaultdict(list)
    for item in items:
        by_reason[item.reason].append(item)
    for reason, group in by_reason.items():
        click.echo(f"{_mib(sum(item.size for item in group))}  {reason}")
        for item in group:
            click.echo(f"  {_mib(item.size)}  {item.path}")
    total = _mib(sum(item.size for item in items)).strip()
    if living:
        one = min(living) if len(living) == 1 else f"each of {len(living)} runs"
        click.echo(f"tokenised data stays: {one} waits, runs or cannot be read", err=True)
    for item in kept:
        click.echo(f"error: {item.path} cannot be removed: check its permissions", err=True)
    if not items:
        click.echo("nothing to remove")
    else:
        then = "removed" if yes else "in all; remove it with: cookbook clean --yes"
        click.echo(f"{total} {then}")
    sys.exit(1 if kept else 0)


def _mib(size: int) -> str:
    return f"{size / 2**20:10,.1f} MiB"
