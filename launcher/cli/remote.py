"""cookbook init and fetch: they use the connection themselves."""

import sys
from functools import partial
from pathlib import Path

import click

from launcher import paths
from launcher.errors import UsageFault
from launcher.remote import chosen
from runspec import files

note = partial(click.echo, err=True)
# As that of all commands, whose module needs more than a laptop has.
_cluster_option = click.option(
    "--cluster",
    metavar="NAME",
    help="Site settings: configs/clusters/NAME.yaml. [default: default]",
)


def _host(ctx: click.Context) -> str:
    """Return the host of the command line or of COOKBOOK_HOST; UsageFault if there is none."""
    host = chosen(ctx.parent.params.get("host") if ctx.parent else None)
    if host is None:
        raise UsageFault(
            f"no host is given: cookbook --host NAME {ctx.info_name}, or export COOKBOOK_HOST=NAME"
        )
    return host


@click.command()
@click.argument("run")
@click.option("--export", "part", flag_value=files.EXPORT, help="The model. This is the default.")
@click.option(
    "--adapter",
    "part",
    flag_value=f"{files.EXPORT}/{files.ADAPTER}",
    help="Only the adapter.",
)
@click.option("--logs", "part", flag_value=files.LOGS, help="The logs of all attempts.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the files. [default: one with the run's name, here]",
)
@_cluster_option
@click.pass_context
def fetch(
    ctx: click.Context, run: str, part: str | None, output: Path | None, cluster: str | None
) -> None:
    """Copy the model, the adapter or the logs of RUN from the cluster to this machine.

    If run again, it continues: complete files are not sent again. rsync verifies every file.
    """
    from launcher.remote import client

    click.echo(client.fetch(_host(ctx), run, part or files.EXPORT, output, cluster))


@click.command()
@click.option(
    "--host",
    metavar="NAME[:FOLDER]",
    help="A host of your ssh configuration, and the folder for the kit there, which the nodes "
    "share. [default folder: slurm-cookbook in your home directory]",
)
@click.option("--torch", metavar="BUILD", help="Build of torch for the nodes: setup.sh --help.")
@click.pass_context
def init(ctx: click.Context, host: str | None, torch: str | None) -> None:
    """Install the kit on a cluster: copy it, and run setup.sh and doctor there.

    It can be repeated: what is finished is kept.
    """
    from launcher.remote import client

    given = chosen(host) if host else _host(ctx)
    if given is None:
        raise UsageFault("init needs a host other than this machine: --host NAME")
    sys.exit(client.install(given, paths.REPO_ROOT, torch, note))
