"""What several commands take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from launcher import cluster as clusters
from launcher import runs


def cluster_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --cluster to a command."""
    return click.option(
        "--cluster",
        metavar="NAME",
        help="Site settings: configs/clusters/NAME.yaml. [default: default]",
    )(command)


def runs_root(cluster: str | None) -> Path:
    """Return where this site's runs lie."""
    return runs.runs_root(clusters.load(cluster).root)


def note(line: str) -> None:
    """Say something that is no result: to standard error."""
    click.echo(line, err=True)
