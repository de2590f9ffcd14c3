"""Starting a run again from its last complete checkpoint."""

from __future__ import annotations

from launcher import executors
from launcher.errors import UsageFault
from launcher.runs.directory import Run, locked
from launcher.runs.states import state_of
from launcher.workflows.submit import start
from runspec import files


def resume(run: Run, local: bool = False) -> None:
    """Start a new job of a run; UsageFault if it is finished or a job of it is still there.

    The job runs where the last one ran, or, if local, on this host without Slurm.
    """
    with locked(run):
        state = state_of(run)
        if state.word == "COMPLETED":
            raise UsageFault(f"{run.name} is finished: its model is in {run.path / files.EXPORT}")
        if not state.ended:
            detail = f", {state.detail}" if state.detail else ""
            raise UsageFault(
                f"{run.name} is {state.word} ({executors.title(state.job_id)}{detail}): follow it "
                f"with: cookbook watch {run.name}, or end it with: cookbook cancel {run.name}"
            )
        start(run, executors.choose(True) if local else executors.executor_of(run.job_id))
