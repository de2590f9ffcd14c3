"""cookbook results, report, diff and replay"""

import json
import subprocess
import sys
from pathlib import Path

import click

from launcher import site as sites
from launcher.cli import completion
from launcher.cli.common import cluster_option, flag, json_option, note, runs_root, since_option
from launcher.cli.number import FloatRange
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
@click.option("--price", type=FloatRange(min=0), help="Price of a GPU-hour. [default: the site's]")
@cluster_option
def results(
    wanted: tuple[str, ...],
    show_all: bool,
    since: str | None,
    form: str,
    sort: str | None,
    price: float | None,
    cluster: str | None,
) -> None:
    """Compare runs: the settings that differ, and loss, speed, memory, GPU-hours and cost.

    A SWEEP means all its runs. Without RUN, the newest 20 are compared. The lowest val_loss comes
    first, or, if no run has one, the lowest mean loss of the last 10 % of the steps. LOST is the
    part of the GPU-hours whose steps are not in a checkpoint.
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
    rate = site.gpu_hour_price if price is None else price
    rows, keys = compare(chosen, rate)
    click.echo(shown(ordered(rows, sort), keys, form))
    if rate is not None and form == "table":
        unit = f" {site.currency}" if site.currency and price is None else ""
        note(f"COST is at {rate:g}{unit} per GPU-hour")


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
@click.option("--price", type=FloatRange(min=0), help="Price of a GPU-hour. [default: the site's]")
@cluster_option
def report(
    wanted: tuple[str, ...], output: Path | None, price: float | None, cluster: str | None
) -> None:
    """Write an HTML report of each RUN: curves, outcome, attempts, profile, provenance.

    It includes the evaluations of the model.

    Several runs, or those of a SWEEP, share their charts.

    The report is one self-contained file.
    """
    site = sites.load(cluster)
    runs = runs_of(site.root, wanted)
    target = output or (runs[0].path if len(runs) == 1 else Path.cwd()) / "report.html"
    rate = site.gpu_hour_price if price is None else price
    for fault in reports.write(runs, target, rate):
        note(f"skipped: {fault}")
    click.echo(target)


@click.command()
@click.argument("a", shell_complete=completion.runs)
@click.argument("b", shell_complete=completion.runs)
@json_option
@cluster_option
def diff(a: str, b: str, as_json: bool, cluster: str | None) -> None:
    """Show the differences between runs A and B, and whether only one thing changed."""
    root = runs_root(cluster)
    one, other = find(root, a), find(root, b)
    if as_json:
        click.echo(json.dumps(comparison.as_json(one, other), indent=1))
    else:
        click.echo("\n".join(comparison.lines(one, other)))


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
