"""Runs as rows of a table, and as objects for a program to read."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from launcher.observe.summary import duration
from launcher.runs.directory import Run
from launcher.runs.states import State


def row(run: Run, state: State) -> dict[str, Any]:
    """Return what `cookbook status --json` prints for one run."""
    progress, status, metrics = run.progress, run.status, run.metrics
    newest = metrics[-1] if metrics else {}
    return {
        "run": run.name,
        "state": state.word,
        "source": state.source,
        "detail": state.detail,
        "job_id": state.job_id,
        "attempt": status.get("attempt"),
        "nodes": status.get("nodes"),
        "step": newest.get("step", progress.get("step")),
        "total_steps": progress.get("total_steps"),
        "loss": newest.get("loss"),
        "checkpoint_step": progress.get("checkpoint_step"),
        "path": str(run.path),
    }


def table(runs: list[Run], states: dict[str, State]) -> Iterator[str]:
    """Yield a heading and one line per run."""
    width = max(len(run.name) for run in runs)
    layout = "{:<" + str(width) + "}  {:<11} {:<14} {:<12} {:<8} {:<12} {}"
    yield layout.format("RUN", "STATE", "JOB", "STEP", "LOSS", "AGE", "NOTE")
    for run in runs:
        values = row(run, states[run.name])
        loss = f"{values['loss']:.4f}" if isinstance(values["loss"], int | float) else "-"
        step = "-" if values["step"] is None else f"{values['step']}/{values['total_steps'] or '?'}"
        cells = (values["state"], values["job_id"] or "-", step, loss, _age(run), values["detail"])
        yield layout.format(run.name, *cells).rstrip()


def _age(run: Run) -> str:
    """Return how long ago a run was made, which its name says."""
    made = datetime.strptime(run.name[:15], "%Y%m%d-%H%M%S").replace(tzinfo=UTC).timestamp()
    return duration(time.time() - made)
