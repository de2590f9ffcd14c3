"""Starting a run again from its last complete checkpoint."""

from __future__ import annotations

from launcher import executors
from launcher.errors import RunFault, UsageFault
from launcher.runs.directory import Run, locked
from launcher.runs.states import State, living, state_of
from launcher.workflows.submit import start
from runspec import files


def resume(run: Run, local: bool = False) -> None:
    """Start a new job of a run; UsageFault if it is finished or a job of it is still there.

    The job runs where the last one ran, or, if local, on this host without Slurm.
    """
    with locked(run) as lease:
        if faults := run.broken():
            raise RunFault([f"{fault}; then: cookbook resume {run.name}" for fault in faults])
        _refuse_unless_ended(run, state_of(run))
        start(run, executors.choose(True) if local else executors.executor_of(run.job_id), lease)


def _refuse_unless_ended(run: Run, state: State) -> None:
    if state.word == "COMPLETED":
        raise UsageFault(f"{run.name} is finished: its model is in {run.path / files.EXPORT}")
    if state.elsewhere:
        raise UsageFault(
            f"{run.name} is {state.word} ({executors.title(state.job_id)}): {state.detail}, and "
            f"look with: cookbook status {run.name}"
        )
    job_id, word, detail = state.job_id, state.word, state.detail
    if state.ended:
        # Its last word may be older than a job that waits: submitted by hand, or nobody knows of it
        # because the command that made it was killed.
        jobs = [(job_id, word) for job_id, word in living(run).items() if word != "COMPLETING"]
        if not jobs:
            return
        (job_id, word), detail = jobs[-1], ""
    detail = f", {detail}" if detail else ""
    raise UsageFault(
        f"{run.name} is {word} ({executors.title(job_id)}{detail}): follow it with: cookbook watch "
        f"{run.name}, or end it with: cookbook cancel {run.name}"
    )
