"""The state of runs: what the job wrote itself, else what squeue, sacct or this host says."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from launcher.errors import RunFault, SlurmFault
from launcher.run.directory import Run, Snapshot, locked
from launcher.slurm.executors import executor_of
from launcher.slurm.job import Executor, Job
from launcher.slurm.job import State as State
from runspec import files
from runspec.states import FINAL

# The states, as the job wrote them, in which no attempt runs that could record the job's end.
_WAITS = frozenset({"", "RETRYING", "REQUEUED", "INTERRUPTED"})
# After these ends of an attempt Slurm has put the job back into the queue.
_GOES_BACK = frozenset({"requeued", "preempted"})
# So much of a job's log is read; a script that ends before its first attempt writes little.
_LOG_BYTES = 65536


def state_of(run: Run) -> State:
    """Return one run's state."""
    return states([run])[run.name]


def own_state(run: Run) -> str:
    """Return the state that the newest job wrote, "" if it has written none yet."""
    return str(run.own_status.get("state") or "")


def living(run: Run) -> dict[str, str]:
    """Return every job of a run that waits or runs, and its state, oldest first.

    Raises:
        SlurmFault: Slurm cannot be asked.
        RunFault: the run's job belongs to another host or cluster.
    """
    job = run.job
    if own_state(run) in FINAL and not run.starting:
        # That job has ended, wherever it ran. Left is what somebody submitted by hand here.
        job = Job(job.token, job.job_id)
    return executor_of(job.job_id).living(job, unsure=run.starting)


def states(wanted: Iterable[Run]) -> dict[str, State]:
    """Return each run's state by name, with at most one question to squeue and one to sacct.

    The order is: the job's own final state, squeue, sacct, else UNKNOWN.
    """
    return {run.name: state for run, state in judged(wanted)}


def judged(wanted: Iterable[Run]) -> Iterator[tuple[Run, State]]:
    """Yield each run as a snapshot, with its state; those that have ended by their own word first.

    Only one snapshot is held at a time, so that many runs take little memory.
    """
    asked: dict[Executor, dict[str, Job]] = {}
    again: dict[str, Run] = {}
    for each in wanted:
        run = Snapshot(each.path)
        if own_state(run) in FINAL and not run.starting:
            yield run, _with_faults(_from_status(run), run.broken())
        else:
            asked.setdefault(executor_of(run.job_id), {})[run.name] = run.job
            again[run.name] = each
    for executor, jobs in asked.items():
        try:
            job_states = executor.states(list(jobs.values()))
        except SlurmFault as fault:
            nothing = State("", "nobody", fault.faults[0])
            job_states = {job.token: nothing for job in jobs.values()}
        for name, job in jobs.items():
            # Read anew: its last word may have come while Slurm was asked.
            run = Snapshot(again[name].path)
            state = _judge(run, job_states[job.token])
            if state.word == "CANCELLED" and state.ended and own_state(run) in _WAITS:
                _keep_cancelled(run, str(state.job_id))
            yield run, _with_faults(state, run.broken())


def write_cancelled(run: Run, job_id: str, message: str) -> None:
    """Record that a job was cancelled while no attempt ran: only an attempt records its own end.

    Raises:
        RunFault: it cannot be written.
    """
    ended = {"state": "CANCELLED", "job_id": job_id, "cause": "cancelled", "message": message}
    run.write(files.STATUS, {"attempt": -1, **run.status, **ended, "updated": time.time()})


def _keep_cancelled(seen: Snapshot, job_id: str) -> None:
    """Record what Slurm says now of a job that waited, and forgets later."""
    run = Run(seen.path)
    # Not if another command has begun to change the run, or somebody else owns it.
    with suppress(RunFault), locked(run):
        # A broken status may have been a final one.
        if not run.broken() and (run.status, run.submission) == (seen.status, seen.submission):
            write_cancelled(run, job_id, "its job was cancelled while it was pending")


def _with_faults(state: State, faults: Sequence[str]) -> State:
    """Return a state whose detail names the run's broken files first."""
    if not faults:
        return state
    return replace(state, detail="; ".join(filter(None, [*faults, state.detail])))


def _from_status(run: Run) -> State:
    status = run.status
    detail, word = str(status.get("message") or ""), status["state"]
    if word == "FAILED" and status.get("cause") == "out_of_memory" and run.sweep:
        word = "OUT_OF_MEMORY"  # a sweep asks whether it fits
    return State(word, "status.json", detail, ended=True, job_id=run.job_id)


def _judge(run: Run, job: State) -> State:
    """Return the state of a run whose job has not written a final one."""
    status, own, resume = run.status, own_state(run), f"continue with: cookbook resume {run.name}"
    message, job_id = str(status.get("message") or ""), job.job_id or run.job_id
    if own in FINAL and (job.ended or not job.word) and job_id == run.job_id:
        return _from_status(run)
    if not job.word and run.sweep and not (run.all_jobs or run.starting):
        explanation = f"not started yet; start it with: cookbook sweep --resume {run.sweep}"
        return State("PENDING", "nobody", explanation, True)
    if not job.word and not job.ended:  # cannot be asked now
        word = own or "UNKNOWN"
        return State(word, "status.json", job.detail, job_id=job_id, elsewhere=job.elsewhere)
    if not job.word and own == "INTERRUPTED":
        if status.get("cause") in _GOES_BACK:
            message += ", and it has since left the queue: cancelled there, or Slurm lost it"
        return State(own, "status.json", f"{message}; {resume}", ended=True, job_id=job_id)
    if not job.word:
        last = f"its last state was {own}" if own else f"it has written no state{_log_says(run)}"
        return State("UNKNOWN", "nobody", f"{job.detail}, {last}; {resume}", True, job_id)
    # What the status says about an earlier job is no news about this one.
    message = message if own and str(status.get("job_id")) == job_id else ""
    if job.ended:
        started = [message or job.detail]
        if not message and job.word != "COMPLETED":
            started += [_how_far(run, own)]
        details = [", ".join(filter(None, started)), "" if job.word == "COMPLETED" else resume]
    elif message:
        details = [f"attempt {status.get('attempt')} ended: {message}", job.detail]
    else:
        details = [job.detail]
    if not job.ended and _is_cancelled(run, job_id):
        details.insert(0, "cancelled, and ending")
    detail = "; ".join(filter(None, details))
    return State(job.word, job.source, detail, job.ended, job_id)


def _is_cancelled(run: Run, job_id: str | None) -> bool:
    mark = files.peek(run.path / files.CANCELLED)
    return bool(mark) and mark.get("job_id") == job_id


def _how_far(run: Run, own: str) -> str:
    """Say how far the newest job came, which has ended without saying why."""
    if not own:
        return f"before its first attempt{_log_says(run)}"
    return "it ended without a final state (killed?)" if own == "RUNNING" else ""


def _log_says(run: Run) -> str:
    """Return the last word of the newest job's script, for a job that has written no state."""
    begin = (run.all_jobs or [{}])[-1].get("log_bytes")
    try:
        with (run.path / files.JOB_LOG).open("rb") as log:
            log.seek(begin if isinstance(begin, int) else 0)
            text = log.read(_LOG_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""
    written = [line.strip() for line in text.splitlines() if line.strip()]
    of_cookbook = [line.partition("cookbook: ")[2] for line in written if "cookbook: " in line]
    last = (of_cookbook or written or [""])[-1]
    return f" (job.log says: {last})" if last else ""
