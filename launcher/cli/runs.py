"""cookbook cancel and resume"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from launcher import site as sites
from launcher.check import preflight
from launcher.cli.common import cluster_option, note, resource_options, runs_root
from launcher.cli.status import watch_to_the_end
from launcher.do.cancel import cancel as cancel_run
from launcher.do.resume import Changes
from launcher.do.resume import resume as resume_run
from launcher.do.submit import PlannedRun, context, submit
from launcher.do.sweep import cancel_all
from launcher.run.directory import Run
from launcher.run.find import find
from launcher.run.sweeps import runs_of
from launcher.slurm.executors import choose, title


@contextmanager
def interruption_told(run: Run) -> Iterator[None]:
    """After Ctrl-C, say what is queued of a run and end with status 130."""
    before = run.job_id
    try:
        yield
    except KeyboardInterrupt:
        if run.job_id != before:
            note(
                f"\ninterrupted, but {run.name} is queued as {title(run.job_id)}: follow it with: "
                f"cookbook watch {run.name}, or end it with: cookbook cancel {run.name}"
            )
        elif run.starting:
            note(
                f"\ninterrupted before Slurm answered, so {run.name} may be queued: check with: "
                f"cookbook status {run.name}"
            )
        else:
            note("\ninterrupted: no job was queued")
        sys.exit(130)


def launched(
    planned: PlannedRun,
    verb: str,
    dry_run: bool,
    no_check: bool = False,
) -> Run | None:
    """Submit a planned run; for a dry run print its job script and return None.

    Args:
        verb: the command, for its warnings.
    """
    if not dry_run:
        with interruption_told(Run(planned.path)):
            return submit(planned, note, no_check)
    click.echo(planned.script, nl=False)
    for fault in preflight.faults(context(planned), no_check, quick=True):
        note(f"warning: {verb} would refuse this: {fault}")
    return None


@click.command()
@click.argument("run", metavar="RUN|SWEEP")
@cluster_option
def cancel(run: str, cluster: str | None) -> None:
    """Cancel RUN (a name, a unique part of it, a job id, or last), or a SWEEP's unfinished runs."""
    chosen = runs_of(sites.load(cluster).root, [run])
    if len(chosen) == 1:
        click.echo(cancel_run(chosen[0]))
        return
    click.echo("\n".join(cancel_all(chosen)))


@click.command()
@click.argument("run")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@resource_options
@click.option("--local", is_flag=True, help="Continue on this host, without Slurm.")
@click.option("--watch", "follow", is_flag=True, help="Follow the run to its end.")
@click.option("--no-check", is_flag=True, help="Skip the checks of changes that can be skipped.")
@click.option(
    "--code",
    type=click.Choice(["own", "current"]),
    default="own",
    show_default=True,
    help="The kit's code: the run's own, or the current one.",
)
@cluster_option
def resume(
    run: str,
    overrides: tuple[str, ...],
    local: bool,
    follow: bool,
    no_check: bool,
    code: str,
    cluster: str | None,
    **resources: str | int | None,
) -> None:
    """Resume RUN from its last complete checkpoint.

    Options and KEY=VALUE change its settings: other nodes, another layout, a new learning rate.
    docs/keys.md says which keys may change.
    """
    chosen = find(runs_root(cluster), run)
    options = {key: value for key, value in resources.items() if value is not None}
    changes = None
    if overrides or options or code == "current":
        site = sites.load(cluster or chosen.submission.get("site"))
        changes = Changes(site, overrides, options, no_check, code == "current")
    with interruption_told(chosen):
        started = resume_run(chosen, choose(local) if local else None, changes, note)
    if started:
        click.echo(f"resumed {chosen.name} as {title(chosen.job_id)}")
    if follow:
        sys.exit(watch_to_the_end(chosen))
