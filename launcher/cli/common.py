"""What several commands take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from launcher import cluster as clusters


def cluster_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --cluster to a command."""
    return click.option(
        "--cluster",
        metavar="NAME",
        help="Site settings: configs/clusters/NAME.yaml. [default: default]",
    )(command)


def resource_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add what is asked of Slurm most often to a command."""
    options = (
        click.option("--nodes", type=click.IntRange(min=1), help="Number of nodes."),
        click.option(
            "--gpus-per-node",
            type=click.IntRange(min=1),
            help="GPUs on each node; one rank runs on each.",
        ),
        click.option(
            "--time", metavar="LIMIT", help="Time limit: 04:00:00, 90 (minutes), 2-00:00:00."
        ),
        click.option("--partition", metavar="NAME", help="Slurm partition."),
        click.option("--account", metavar="NAME", help="Slurm account."),
        click.option("--qos", metavar="NAME", help="Slurm quality of service."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def on_nodes_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --on-nodes to a command."""
    return click.option(
        "--on-nodes",
        multiple=True,
        metavar="PATH",
        help="What lies under PATH is only on the nodes: do not look for it here.",
    )(command)


def runs_root(cluster: str | None) -> Path:
    """Return where this site's runs lie."""
    # Not every command needs runs, and what they need to be rendered takes its time to import.
    from launcher import runs

    return runs.runs_root(clusters.load(cluster).root)


def note(line: str) -> None:
    """Say something that is no result: to standard error."""
    click.echo(line, err=True)
