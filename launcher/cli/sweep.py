"""cookbook sweep"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

import click

from launcher import paths, yamlfile
from launcher import site as sites
from launcher.cli import common
from launcher.cli.common import note
from launcher.do import sweep as workflow
from launcher.plugins import hook
from launcher.recipe import sweep as sweeps_of_the_kit
from launcher.run.directory import Run
from launcher.run.sweeps import every, find
from launcher.slurm import executors
from launcher.slurm.job import Executor


@click.command()
@click.argument("words", nargs=-1, metavar="[NAME] [KEY=VALUE]...")
@common.resource_options
@click.option("--parallel", type=click.IntRange(min=1), help="Maximum number of concurrent runs.")
@common.flag("--dry-run", help="Print the prediction of every cell; submit nothing.")
@common.flag("--resume", help="Restart the unfinished runs of the sweep NAME.")
@common.flag("--local", help="Run on this host, without Slurm, one after the other.")
@common.flag("--no-check", help="Skip the checks that can be skipped.")
@common.cluster_option
def sweep(
    words: tuple[str, ...],
    parallel: int | None,
    dry_run: bool,
    resume: bool,
    local: bool,
    no_check: bool,
    cluster: str | None,
    **resources: str | int | None,
) -> None:
    """Run a recipe with many settings, with a limit on concurrent runs.

    NAME is a file in configs/sweeps/, or the path of your own file. KEY=VALUE overrides a key in
    every cell. Each cell is a normal run. Running out of memory is a result. Without NAME, the
    existing sweeps are listed.
    """
    site = sites.load(cluster)
    name, overrides = (words[0], words[1:]) if words else (None, ())
    given = {key: value for key, value in resources.items() if value is not None}
    if name is None:
        if given or parallel or any((dry_run, resume, local, no_check)):
            raise click.UsageError("NAME is missing. List the sweeps with: cookbook sweep")
        _list(site)
        return
    executor = executors.choose(local)
    if resume:
        if overrides or given or dry_run or no_check:
            raise click.UsageError("--resume can be combined only with --parallel and --local")
        made = find(site.root, name)
        parallel = parallel or int(made[0].submission["parallel"])
        _start(made, workflow.to_resume(made, note), executor, parallel, again=True)
        return
    definition = sweeps_of_the_kit.load(name)
    planned = workflow.plan_sweep(definition, site, executor, overrides, given, parallel)
    if dry_run:
        _show(planned, executor, no_check)
        return
    made = workflow.submit_sweep(planned, note, no_check)
    _start(made, made, executor, planned.parallel)


def _show(planned: workflow.PlannedSweep, executor: Executor, no_check: bool) -> None:
    """Print what would be submitted, and what would refuse it.

    The hook "predicted_sweep" makes of name and recipe of each cell, the root of runs and the name
    of a GPU something with `lines`.
    """
    predict, site = hook("predicted_sweep"), planned.site
    named = zip(planned.sweep.cells, planned.runs, strict=True)
    cells = [(cell.name, run.recipe) for cell, run in named]
    if predict:
        lines = predict(cells, site.root, planned.sweep.gpu or site.gpu).lines()
    else:
        lines = [name for name, _ in cells]
    click.echo("\n".join(lines))
    how = f"at most {planned.parallel} concurrently" if executor.queued else "one after the other"
    script = f"cookbook submit {planned.sweep.recipe} --dry-run"
    click.echo(f"{len(cells)} jobs, {how}; the recipe's job script: {script}")
    for fault in workflow.faults(planned, no_check):
        note(f"warning: sweep would refuse this: {fault}")


def _start(
    runs: Sequence[Run],
    chosen: Sequence[Run],
    executor: Executor,
    parallel: int,
    again: bool = False,
) -> None:
    """Start chosen runs of a sweep; those on this host are followed to their end."""
    name = runs[0].sweep
    try:
        workflow.start_runs(chosen, executor, parallel, note, again)
    except KeyboardInterrupt:
        note(
            "\nstopped starting runs; the started ones continue. Start the others with: cookbook "
            f"sweep --resume {name}{'' if executor.queued else ' --local'}"
        )
        sys.exit(130)
    if not executor.queued:
        left = len(workflow.unfinished(runs))
        click.echo(f"{len(runs) - left} of {len(runs)} runs are done: cookbook results {name}")
        sys.exit(1 if left else 0)
    verb = "resumed" if again else "submitted"
    count = f"{len(chosen)} run{'s' * (len(chosen) != 1)}"
    click.echo(f"{verb} {name}: {count}, at most {parallel} concurrently")
    click.echo(f"  follow it  cookbook watch {name}   or   cookbook status {name}")
    click.echo(f"  compare    cookbook results {name}   or   cookbook report {name}")


def _list(site: sites.Site) -> None:
    """Print the sweeps of the kit, and those that were started."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10**6
    for name in yamlfile.names(paths.SWEEPS):
        known = sweeps_of_the_kit.load(name)
        line = f"{name:<20} {len(known.cells):>3} runs  {known.description}"
        click.echo(line[:width].rstrip())
    started = every(site.root)
    if started:
        click.echo("\nstarted:")
    for name in started:
        click.echo(f"  {name}")
