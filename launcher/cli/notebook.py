"""cookbook notebook"""

import sys
from pathlib import Path

import click

from launcher import site as sites
from launcher.cli import completion
from launcher.cli.common import cluster_option, flag, note, runs_root
from launcher.cli.number import IntRange
from launcher.errors import UsageFault
from launcher.observe import notebook as jupyter
from launcher.observe import servers
from launcher.recipes.recipe import Resources
from launcher.runs.directory import Run
from launcher.runs.find import find


@click.command()
@click.argument("run", required=False, shell_complete=completion.runs)
@flag("--here", help="Start it on this host, without a job.")
@flag("--beside", help="On the first node of RUN's own job, with its GPUs, until that ends.")
@click.option("--gpus", type=IntRange(min=1), help="GPUs of the job. [default: none]")
@click.option("--time", metavar="LIMIT", help="Time limit of the job. [default: 4 hours]")
@click.option("--partition", metavar="NAME", help="Slurm partition of the job.")
@click.option("--account", metavar="NAME", help="Slurm account of the job.")
@click.option("--qos", metavar="NAME", help="Quality of service of the job.")
@click.option("--folder", metavar="PATH", help="Folder to show. [default: RUN's, else this one]")
@click.option(
    "--jupyter", "program", metavar="PATH", help="Jupyter's program. [default: the kit's, or PATH]"
)
@click.option("--jump", metavar="HOSTS", hidden=True, help="What ssh passes through.")
@cluster_option
def notebook(
    run: str | None,
    here: bool,
    beside: bool,
    program: str | None,
    folder: str | None,
    jump: str | None,
    cluster: str | None,
    **given: str | int | None,
) -> None:
    """Start Jupyter on a node, in a small job, and print its address; Ctrl-C ends the job.

    RUN: show its folder. Jupyter and its Python are those of the kit's environment or of your
    shell, such as of an active conda environment.
    """
    site = sites.load(cluster)
    asked = {key: value for key, value in given.items() if value is not None}
    if here and beside:
        raise UsageFault("--here and --beside exclude each other")
    if beside and run is None:
        raise UsageFault("--beside needs RUN: cookbook notebook RUN --beside")
    if asked and (here or beside):
        raise UsageFault(f"--{min(asked)} cannot be used with --here or --beside: leave it out")
    chosen = find(runs_root(cluster), run) if run else None
    default = chosen.path if chosen else Path.cwd()
    shown = Path(folder).expanduser().absolute() if folder else default
    if not shown.is_dir():
        raise UsageFault(f"--folder {folder} is no folder")
    job, nodes = _running(chosen) if chosen and beside else ("", [])
    found = jupyter.program(program)
    if here or jump:
        port = servers.free_port(None, jupyter.PORTS)
        sys.exit(jupyter.serve(found, shown, port, note, jump or site.jump_host))
    argv = ["--jupyter", str(found), "--folder", str(shown)]
    if beside:
        sys.exit(servers.beside("notebook", argv, job, nodes[0], site, cluster))
    gpus = asked.pop("gpus", 0)
    resources = sites.with_site_defaults(Resources.of(asked), site)
    sys.exit(servers.on_node("notebook", argv, resources, site, cluster, int(gpus)))


def _running(run: Run) -> tuple[str, list[str]]:
    """Return the job and the nodes of a run that runs now."""
    nodes, job = run.status.get("nodes") or [], run.job_id or ""
    if run.status.get("state") != "RUNNING" or not nodes or not job.isdigit():
        raise UsageFault(
            f"{run.name} runs on no node now: leave --beside out, and the notebook gets a job of "
            "its own"
        )
    return job, nodes
