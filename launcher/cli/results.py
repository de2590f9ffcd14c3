"""cookbook results, report, diff, replay and profile"""

import json
import subprocess
import sys
from pathlib import Path

import click

from launcher import site as sites
from launcher.cli.common import cluster_option, flag, json_option, note, runs_root
from launcher.do import replay as replaying
from launcher.errors import UnknownRun, UsageFault
from launcher.look import diff as comparison
from launcher.look import profile as profiles
from launcher.look import report as reports
from launcher.look.results import compare, ordered, table
from launcher.run.find import every, find, none_yet
from launcher.run.sweeps import runs_of

_NEWEST = 20


@click.command()
@click.argument("wanted", nargs=-1, metavar="[RUN|SWEEP]...")
@flag("--all", "show_all", help=f"All runs, not only the newest {_NEWEST}.")
@json_option
@cluster_option
def results(wanted: tuple[str, ...], show_all: bool, as_json: bool, cluster: str | None) -> None:
    """Compare runs: the settings that differ, and loss, speed, memory, GPU-hours and cost.

    A SWEEP means all its runs. Without RUN, the newest 20 are compared. The lowest val_loss comes
    first, or, if no run has one, the lowest mean loss of the last 10 % of the steps.
    """
    site = sites.load(cluster)
    root = runs_root(cluster)
    if wanted and show_all:
        raise UsageFault("--all compares all runs: give no RUN or SWEEP with it")
    chosen = runs_of(site.root, wanted) if wanted else every(root)
    everything = len(chosen)
    if not (wanted or show_all):
        chosen = chosen[-_NEWEST:]
        if len(chosen) < everything:
            note(f"the newest {_NEWEST} of {everything} runs; more: cookbook results --all")
    chosen = [run for run in chosen if not run.torn]
    if not chosen:
        raise UnknownRun(none_yet(root))
    rate = site.gpu_hour_price
    rows, keys = compare(chosen, rate)
    rows = ordered(rows)
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    click.echo("\n".join(table(rows, keys)))
    if rate is not None:
        note(f"COST is at {rate:g} {site.currency or ''}".rstrip() + " per GPU-hour")


@click.command()
@click.argument("wanted", nargs=-1, required=True, metavar="RUN|SWEEP...")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Output file. [default: report.html in the run's directory, or here for several runs]",
)
@cluster_option
def report(wanted: tuple[str, ...], output: Path | None, cluster: str | None) -> None:
    """Write an HTML report of each RUN: curves, outcome, attempts, provenance.

    It includes the evaluations of the model.

    Several runs, or those of a SWEEP, share their charts.

    The report is one self-contained file.
    """
    site = sites.load(cluster)
    runs = runs_of(site.root, wanted)
    target = output or (runs[0].path if len(runs) == 1 else Path.cwd()) / "report.html"
    reports.write(runs, target, site.gpu_hour_price)
    click.echo(target)


@click.command()
@click.argument("a")
@click.argument("b")
@cluster_option
def diff(a: str, b: str, cluster: str | None) -> None:
    """Show the differences between runs A and B, and whether only one thing changed."""
    root = runs_root(cluster)
    click.echo("\n".join(comparison.lines(find(root, a), find(root, b))))


@click.command()
@click.argument("run")
@flag("--dry-run", help="Print the job script and submit nothing.")
@flag("--local", help="Run on this host, without Slurm.")
@cluster_option
def replay(run: str, dry_run: bool, local: bool, cluster: str | None) -> None:
    """Submit a new run with the recipe, code and uncommitted changes of RUN."""
    site = sites.load(cluster)
    options = ["--dry-run"] * dry_run + ["--local"] * local
    again = replaying.prepare(find(runs_root(cluster), run), site, options, note)
    sys.exit(subprocess.run(again.argv, cwd=again.code, env=again.environment).returncode)


@click.command()
@click.argument("run", default="last")
@click.option(
    "--top", type=click.IntRange(min=1), default=8, show_default=True, help="Number of operators."
)
@cluster_option
def profile(run: str, top: int, cluster: str | None) -> None:
    """Show the slowest operators of RUN's profiled steps.

    Record them with: cookbook submit RECIPE --profile. cookbook tensorboard shows computation and
    communication of each rank.
    """
    click.echo("\n".join(profiles.lines(find(runs_root(cluster), run), top)))
