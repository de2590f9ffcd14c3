"""cookbook status, watch, cancel and resume"""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from launcher import jobs, report, runs
from launcher.cli.common import cluster_option, note, runs_root
from launcher.runs import Run, State


@click.command()
@click.argument("run", required=False)
@click.option("--all", "show_all", is_flag=True, help="All runs, not only the newest 20.")
@click.option("--json", "as_json", is_flag=True, help="Print for a program to read.")
@cluster_option
def status(run: str | None, show_all: bool, as_json: bool, cluster: str | None) -> None:
    """Show the newest runs, or one RUN: a name, a unique part of it, a job id, or last."""
    root = runs_root(cluster)
    chosen = [runs.find(root, run)] if run is not None else runs.every(root)
    chosen = chosen if show_all or run is not None else chosen[-20:]
    states = runs.states(chosen)
    if as_json:
        rows = [_row(each, states[each.name]) for each in chosen]
        click.echo(json.dumps(rows if run is None else rows[0], indent=1))
    elif run is not None:
        for line in report.summary(chosen[0], states[chosen[0].name]):
            click.echo(line)
    elif not chosen:
        note(f"no run in {root} yet: start one with: cookbook submit --recipe demo")
    else:
        width = max(len(each.name) for each in chosen)
        click.echo(
            f"{'RUN':<{width}}  {'STATE':<11} {'JOB':<14} {'STEP':<12} {'LOSS':<8} {'AGE':<12} NOTE"
        )
        for each in chosen:
            row = _row(each, states[each.name])
            step = f"{row['step']}/{row['total_steps']}" if row["step"] is not None else "-"
            loss = f"{row['loss']:.4f}" if row["loss"] is not None else "-"
            line = (
                f"{each.name:<{width}}  {row['state']:<11} {row['job_id'] or '-':<14} {step:<12} "
                f"{loss:<8} "
                f"{runs.age(each):<12} {row['detail']}"
            )
            click.echo(line.rstrip())


def _row(run: Run, state: State) -> dict[str, Any]:
    progress, metrics = run.progress, run.metrics()
    newest = metrics[-1] if metrics else {}
    return {
        "run": run.name,
        "state": state.word,
        "source": state.source,
        "detail": state.detail,
        "job_id": run.job_id,
        "attempt": run.status.get("attempt"),
        "nodes": run.status.get("nodes"),
        "step": newest.get("step", progress.get("step")),
        "total_steps": progress.get("total_steps"),
        "loss": newest.get("loss"),
        "checkpoint_step": progress.get("checkpoint_step"),
        "path": str(run.path),
    }


@click.command()
@click.argument("run", default="last")
@cluster_option
def watch(run: str, cluster: str | None) -> None:
    """Follow RUN to its end; Ctrl-C stops watching, not the run."""
    sys.exit(watch_to_the_end(runs.find(runs_root(cluster), run)))


def watch_to_the_end(run: Run) -> int:
    """Follow a run and print its results; return the exit status, 0 for a completed run."""
    try:
        state = report.watch(run, note)
    except KeyboardInterrupt:
        note(f"\nstopped watching; the run goes on: cookbook watch {run.name}")
        return 130
    for line in report.summary(run, state):
        click.echo(line)
    return 0 if state.word == "COMPLETED" else 1


@click.command()
@click.argument("run")
@cluster_option
def cancel(run: str, cluster: str | None) -> None:
    """Cancel RUN: a name, a unique part of it, a job id, or last."""
    click.echo(jobs.cancel(runs.find(runs_root(cluster), run)))


@click.command()
@click.argument("run")
@click.option("--local", is_flag=True, help="Go on on this host, without Slurm.")
@click.option("--watch", "follow", is_flag=True, help="Follow the run to its end.")
@cluster_option
def resume(run: str, local: bool, follow: bool, cluster: str | None) -> None:
    """Start RUN again from its last complete checkpoint."""
    found = runs.find(runs_root(cluster), run)
    jobs.resume(found, local)
    click.echo(f"resumed {found.name} as {found.job_id}")
    if follow:
        sys.exit(watch_to_the_end(found))
