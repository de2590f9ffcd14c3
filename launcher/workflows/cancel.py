"""Ending a run's job for good: it is neither retried nor requeued."""

from __future__ import annotations

import time
from dataclasses import replace

from launcher.errors import CookbookError
from launcher.executors import executor_of, title
from launcher.runs.directory import Run, locked
from launcher.runs.states import state_of
from runspec import files


def cancel(run: Run) -> str:
    """Cancel a run and return one line that says what was done."""
    with locked(run):
        state = state_of(run)
        if state.ended and state.word != "UNKNOWN":
            return f"{run.name} has ended already: {state.word}"
        job_id = state.job_id
        if job_id is None:
            because = f" ({state.detail})" if state.detail else ""
            return f"no job of {run.name} is known{because}: nothing was cancelled"
        status = run.status
        running = str(status.get("job_id")) == job_id and status.get("state") == "RUNNING"
        # Written first: the job must not take its end for a fault and try again.
        run.write(files.CANCELLED, {"job_id": job_id, "time": time.time()})
        try:
            executor_of(job_id).cancel(replace(run.job, job_id=job_id))
        except CookbookError:
            (run.path / files.CANCELLED).unlink()
            raise
        if not running or state.word == "PENDING":
            _write_cancelled(run, job_id)
    return f"cancelled {run.name} ({title(job_id)}); continue it with: cookbook resume {run.name}"


def _write_cancelled(run: Run, job_id: str) -> None:
    """Record the end of a job between attempts: only an attempt records its end itself."""
    message = "by cookbook cancel, while it waited"
    ended = {"state": "CANCELLED", "job_id": job_id, "message": message, "updated": time.time()}
    run.write(files.STATUS, {"attempt": -1, **run.status, **ended})
