"""cookbook results, report, diff and replay"""

import json
import subprocess
import sys
from pathlib import Path

import click

from launcher import site as sites
from launcher.cli.common import cluster_option, flag, json_option, note, runs_root, since_option
from launcher.errors import UnknownRun, UsageFault
from launcher.observe import diff as comparison
from launcher.observe.results import FORMATS, compare, ordered, shown
from launcher.runs.find import every, find, made_since, none_yet
from launcher.runs.sweeps import runs_of
from launcher.workflows import replay as replaying

_NEWEST = 20


@click.command()
@click.argument("wanted", nargs=-1, metavar="[RUN|SWEEP]...")
@flag("--all", "show_all", help=f"All runs, not only the newest {_NEWEST}.")
@since_option("Runs made since")
@click.option("--format", "form", type=click.Choice(FORMATS), default="table", show_default=True)
@click.option("--sort", metavar="COLUMN", help="As --format json names it; -COLUMN: highest first.")
@click.option("--price", type=click.FloatRange(min=0), help="Of a GPU-hour. [default: the site's]")
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

    A SWEEP stands for all its runs. Without RUN it is the newest 20. The best loss comes first.
    LOST is the part of the GPU-hours whose steps no checkpoint kept.
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
@click.argument("wanted", nargs=-1, required=True, metavar="RUN|SWEEP...")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file. [default: report.html in the run's directory, or here for several runs]",
)
@click.option("--price", type=click.FloatRange(min=0), help="Of a GPU-hour. [default: the site's]")
@cluster_option
def report(
    wanted: tuple[str, ...], output: Path | None, price: float | None, cluster: str | None
) -> None:
    """Write an HTML file about each RUN: curves, outcome, attempts, profile, what made it.

    Evaluations of its model are in it, and what the log says of an endpoint that serves it.

    Several runs, or those of a SWEEP, lie over each other, with bars of their memory and time.

    It is one file that needs nothing else: mail it, or open it at home.
    """
    # Imported late: only this command needs the templates.
    from launcher.observe import report as reports
    from launcher.workflows import stats

    site = sites.load(cluster)
    runs = runs_of(site.root, wanted)
    target = output or (runs[0].path if len(runs) == 1 else Path.cwd()) / "report.html"
    served = stats.of_runs(site, runs, note)
    rate = site.gpu_hour_price if price is None else price
    for fault in reports.write(runs, target, rate, served):
        note(f"passed over: {fault}")
    click.echo(target)


@click.command()
@click.argument("a")
@click.argument("b")
@json_option
@cluster_option
def diff(a: str, b: str, as_json: bool, cluster: str | None) -> None:
    """Say what differs between runs A and B, and whether it is only one thing."""
    root = runs_root(cluster)
    one, other = find(root, a), find(root, b)
    if as_json:
        click.echo(json.dumps(comparison.as_json(one, other), indent=1))
    else:
        click.echo("\n".join(comparison.lines(one, other)))


@click.command()
@click.argument("run")
@flag("--dry-run", help="Say what cannot be the same, print the job script and submit nothing.")
@flag("--local", help="Run on this host, without Slurm.")
@cluster_option
def replay(run: str, dry_run: bool, local: bool, cluster: str | None) -> None:
    """Submit RUN again as a new run: its recipe, its code with uncommitted changes.

    It says what cannot be the same.
    """
    site = sites.load(cluster)
    again = replaying.prepare(find(runs_root(cluster), run), site, note)
    argv = again.command(dry_run, local)
    sys.exit(subprocess.run(argv, cwd=again.checkout, env=again.environment()).returncode)
