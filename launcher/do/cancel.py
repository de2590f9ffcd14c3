"""Ending a run's jobs for good: they are neither retried nor requeued."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from launcher.errors import SlurmFault, SlurmTimeout
from launcher.run.directory import Run, locked
from launcher.run.states import State, living, own_state, state_of, write_cancelled
from launcher.slurm.executors import executor_of, title
from runspec import files


def cancel(run: Run, resumed: bool = True) -> str:
    """Cancel every job of a run that waits or runs, and return one line that says what was done.

    Args:
        resumed: whether the line says how to continue it.
    """
    with locked(run):
        jobs, status = living(run), run.status
        if not jobs:
            return _nothing_to_cancel(run, state_of(run))
        own, newest = str(status.get("job_id")), list(jobs)[-1]
        if own_state(run) == "COMPLETED":
            executor_of(newest).cancel(run.job, list(jobs))
            which = " and ".join(map(title, jobs))
            return f"{run.name} is COMPLETED and stays so: its job is ended ({which})"
        at_work = status.get("state") == "RUNNING" and jobs.get(own, "PENDING") != "PENDING"
        # Two jobs of one run never train at once: the mark is for the one that does.
        with _marked(run, own if at_work else newest):
            executor_of(newest).cancel(run.job, list(jobs))
        if not at_work and not run.broken():
            write_cancelled(run, newest, "by cookbook cancel, while it was pending")
    which = " and ".join(map(title, jobs))
    then = f"; continue it with: cookbook resume {run.name}" if resumed else ""
    return f"cancelled {run.name} ({which}){then}"


def _nothing_to_cancel(run: Run, state: State) -> str:
    if state.ended and state.word != "UNKNOWN":
        return f"{run.name} has already ended: {state.word}"
    because = f" ({state.detail})" if state.detail else ""
    return f"{run.name} has no known job{because}: nothing was cancelled"


@contextmanager
def _marked(run: Run, job_id: str) -> Iterator[None]:
    """Mark a job as cancelled; if it cannot be cancelled, take the mark back.

    The mark comes first: the job must not take its end for a fault and try again. Left on a job
    that goes on, it would make the next fault the run's end.
    """
    mark = run.path / files.CANCELLED
    before = files.read_object(mark)
    run.write(files.CANCELLED, {"job_id": job_id, "time": time.time()})
    try:
        yield
    except BaseException as error:
        if before is None:
            mark.unlink()
        else:
            run.write(files.CANCELLED, before)
        if isinstance(error, SlurmFault):
            verb = "may not be" if isinstance(error, SlurmTimeout) else "was not"
            raise type(error)(
                f"{run.name} {verb} cancelled: {error.faults[0]}; then: cookbook cancel {run.name}"
            ) from error
        raise
