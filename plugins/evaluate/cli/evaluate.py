"""cookbook eval"""

import json
import sys
from typing import Any

import click

from launcher import site as sites
from launcher.cli import common
from launcher.cli.common import note, tell_submitted
from launcher.cli.runs import launched
from launcher.cli.status import watch_to_the_end
from launcher.do import models
from launcher.do import submit as submission
from launcher.errors import RunFault, UsageFault
from launcher.look.watch import watch_all
from launcher.run.directory import Run
from launcher.slurm import executors
from launcher.slurm.executors import title
from plugins.evaluate.launcher import evaluate as workflow
from plugins.evaluate.launcher import evaluation as shown


@click.command(name="eval")
@click.argument("model")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--suite",
    help="Name or YAML file of the suite. [default: validation; pairs for a run trained on pairs]",
)
@click.option(
    "--data",
    metavar="FILE",
    help="Samples of all tasks: JSON, CSV or Parquet. [default: the suite's, or the dataset_val "
    "of the run]",
)
@click.option(
    "--against", metavar="MODEL", help="Compare with base, a run, a folder, or models:/NAME@ALIAS."
)
@common.resource_options
@click.option(
    "--samples", type=click.IntRange(min=0), default=0, help="Number of differing answers to show."
)
@common.flag("--results", "only_results", help="Show the newest result; start nothing.")
@common.flag(
    "--as-gates", help="With --results: print it as the evaluations block of a gates file."
)
@common.flag("--watch", help="Follow the job to its end, and show the result.")
@common.flag("--dry-run", help="Print the job script and submit nothing.")
@common.flag("--local", help="Run on this host, without Slurm.")
@common.json_option
@common.cluster_option
def evaluate(
    model: str,
    overrides: tuple[str, ...],
    suite: str | None,
    data: str | None,
    against: str | None,
    samples: int,
    only_results: bool,
    as_gates: bool,
    watch: bool,
    dry_run: bool,
    local: bool,
    as_json: bool,
    cluster: str | None,
    **resources: Any,
) -> None:
    """Evaluate MODEL (a run, a folder, or models:/NAME@ALIAS) on a suite, as a Slurm job.

    Without --suite and --data a run is asked its own dataset_val. KEY=VALUE overrides a key of the
    suite: tasks.answers.limit=100, batch_size=32.
    """
    site = sites.load(cluster)
    if as_gates and not only_results:
        raise UsageFault("--as-gates requires --results: it prints a finished evaluation")
    if only_results:
        given: dict[str, Any] = {"suite": suite, "data": data, "against": against, "watch": watch}
        given |= {"dry_run": dry_run, "local": local, **resources}
        options = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
        if unused := [*options, *overrides]:
            raise UsageFault(
                "--results starts nothing and shows the newest result: leave "
                f"{', '.join(unused)} out, or --results"
            )
        newest = _newest(site, model)
        if as_gates:
            click.echo("\n".join(shown.as_gates(newest)))
        else:
            _show(newest, as_json, samples)
        return
    planned = workflow.plan(site, model, suite, against, overrides, resources, data)
    for line in (*planned.notes, *planned.recipe.notes):
        note(f"note: {line}")
    of_run = submission.plan(planned.recipe, site, executors.choose(local))
    run = launched(of_run, "eval", dry_run)
    if run is None:
        return
    if not watch:
        if as_json:
            tell_submitted(run, as_json)
        else:
            click.echo(f"submitted {run.name} as {title(run.job_id)}")
            click.echo(f"  the result  cookbook eval {model} --results")
        return
    # What a program reads comes alone.
    code = _followed(run) if as_json else watch_to_the_end(run)
    result = next(iter(shown.results_of(run)), None)
    if result is None:
        raise RunFault(f"{run.name} wrote no result: see cookbook logs --first-error {run.name}")
    _show(result, as_json, samples)
    sys.exit(code)


def _newest(site: sites.Site, model: str) -> dict[str, Any]:
    results = workflow.results(site, models.resolve(site, model))
    if not results:
        raise UsageFault(f"{model} has no result yet: make one with: cookbook eval {model}")
    return results[0]


def _followed(run: Run) -> int:
    return 0 if watch_all([run], note)[0].word == "COMPLETED" else 1


def _show(result: dict[str, Any], as_json: bool, samples: int) -> None:
    if as_json:
        click.echo(json.dumps(result, indent=1))
    else:
        click.echo("\n".join(shown.lines(result, samples)))
