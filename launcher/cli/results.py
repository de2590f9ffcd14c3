"""cookbook results, report, diff and replay"""

import subprocess
import sys
from pathlib import Path

import click

from launcher import site as sites
from launcher.cli import completion
from launcher.cli.common import cluster_option, flag, note, runs_root, since_option
from launcher.do import replay as replaying
from launcher.errors import UnknownRun, UsageFault
from launcher.look import diff as comparison
from launcher.look import report as reports
from launcher.look.results import FORMATS, compare, ordered, shown
from launcher.run.find import every, find, made_since, none_yet
from launcher.run.sweeps import runs_of

_NEWEST = 20


@click.command()
@click.argument("wanted", nargs=-1, metavar="[RUN|SWEEP]...", shell_complete=completion.runs)
@flag("--all", "show_all", help=f"All runs, not only the newest {_NEWEST}.")
@since_option("Runs made since")
@click.option("--format", "form", type=click.Choice(FORMATS), default="table", show_default=True)
@click.option(
    "--sort", metavar="COLUMN", help="Column name as in --format json; -COLUMN: highest first."
)
@cluster_option
def results(
    wanted: tuple[str, ...],
    show_all: bool,
    since: str | None,
    form: str,
    sort: str | None,
    cluster: str | None,
) -> None:
    """Compare runs: the settings that differ, and loss, speed, memory, GPU-hours and cost.

    A SWEEP means all its runs. Without RUN, the newest 20 are compared. The lowest val_loss comes
    first, or, if no run has one, the lowest mean loss of the last 10 % of the steps.
    """
    site = sites.load(cluster)
    root = runs_root(cluster)
    if wanted and (show_all or since):
        raise UsageFault("--all and --since choose from all runs: give no RUN or SWEEP with them")
    chosen = runs_of(site.root, wanted) if wanted else made_since(every(root), since)
    everything = len(chosen)
    if not (wanted or show_all or since):
        chosen = chosen[-_NEWEST:]
        if len(chosen) < everything:
            note(f"the newest {_NEWEST} of {everything} runs; more: cookbook results --all")
    chosen = [run for run in chosen if not run.torn]
    if not chosen:
        raise UnknownRun(
            f"no run was made since {since}: cookbook results --all compares all"
            if every(root)
            else none_yet(root)
        )
    rate = site.gpu_hour_price
    rows, keys = compare(chosen, rate)
    click.echo(shown(ordered(rows, sort), keys, form))
    if rate is not None and form == "table":
        note(f"COST is at {rate:g} {site.currency or ''}".rstrip() + " per GPU-hour")


@click.command()
@click.argument(
    "wanted", nargs=-1, required=True, metavar="RUN|SWEEP...", shell_complete=completion.runs
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Output file. [default: report.html in the run's directory, or here for several runs]",
)
@cluster_option
def report(wanted: tuple[str, ...], output: Path | None, cluster: str | None) -> None:
    """Write an HTML report of each RUN: curves, outcome, attempts, profile, provenance.

    It includes the evaluations of the model.

    Several runs, or those of a SWEEP, share their charts.

    The report is one self-contained file.
    """
    site = sites.load(cluster)
    runs = runs_of(site.root, wanted)
    target = output or (runs[0].path if len(runs) == 1 else Path.cwd()) / "report.html"
    for fault in reports.write(runs, target, site.gpu_hour_price):
        note(f"skipped: {fault}")
    click.echo(target)


@click.command()
@click.argument("a", shell_complete=completion.runs)
@click.argument("b", shell_complete=completion.runs)
@cluster_option
def diff(a: str, b: str, cluster: str | None) -> None:
    """Show the differences between runs A and B, and whether only one thing changed."""
    root = runs_root(cluster)
    click.echo("\n".join(comparison.lines(find(root, a), find(root, b))))


@click.command()
@click.argument("run", shell_complete=completion.runs)
@flag("--dry-run", help="List what cannot be the same, print the job script and submit nothing.")
@flag("--local", help="Run on this host, without Slurm.")
@cluster_option
def replay(run: str, dry_run: bool, local: bool, cluster: str | None) -> None:
    """Submit a new run with the recipe, code and uncommitted changes of RUN.

    It lists what cannot be the same.
    """
    site = sites.load(cluster)
    again = replaying.prepare(find(runs_root(cluster), run), site, note)
    argv = again.command(dry_run, local)
    sys.exit(subprocess.run(argv, cwd=again.code, env=again.environment()).returncode)
