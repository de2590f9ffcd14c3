"""Keeps a run's records from inside its job, again while the filesystem refuses them.

Each function that takes a run directory may be called again, wherever the call before it, or its
process, was ended; whatever raises OSError is, by Recorder.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from runspec import files, publish
from runspec.failure import fault
from runspec.redact import redacted
from runspec.states import LOCAL_PREFIX
from runspec.storage import OF_A_DISK
from slurm import allocation, faults, history, job_log
from slurm.allocation import own_job_id, owned, this_job
from slurm.history import attempts_of, gained_by, read_object, read_progress
from slurm.job_log import say
from slurm.retry import AttemptEnd, Verdict, bad_nodes, decide, ended_by_slurm

T = TypeVar("T")

# Attempts that may end without a record if the recipe has no retries.
_MAX_LOST = 3
# Slurm sends KILL after KillWait, 30 s by default: so long the last records may take.
_LAST_WAIT_S = 15.0


class NotRecorded(Exception):
    """The run's records could not be written for a long time."""


class Follows(Exception):
    """Another thing than an attempt follows, and is recorded; its text says why.

    what: requeue; finished, if nothing is left to train; failed; or superseded, if Slurm has given
    up this node and started the job again.
    """

    def __init__(self, what: str, message: str = "") -> None:
        super().__init__(message)
        self.what = what


def begin(
    run_dir: Path,
    hosts: list[str],
    max_retries: int = 0,
    rollout_hosts: Sequence[str] = (),
    exists: Callable[[str], bool] = allocation.job_exists,
    prepare: Callable[[], object] = lambda: None,
) -> int:
    """Record the start of an attempt; return its number.

    Args:
        rollout_hosts: nodes that generate answers.
        exists: whether a job that had the run may still run.
        prepare: Companion.prepare.

    Raises:
        Follows: nothing is left to train, another job has the run, too many attempts ended without
            a record and saved nothing, or the run was cancelled.
    """
    status = read_object(run_dir / files.STATUS)
    running = status.get("state") == "RUNNING"
    repeated = running and allocation.is_of_this_start(status)
    _refuse_what_is_done(run_dir, status)
    if running and not repeated:
        _end_of_earlier(run_dir, status, max_retries, exists)
    number = history.next_attempt(run_dir, status)
    if repeated:
        # An end would have been recorded before another attempt of this start of the job.
        number = int(status.get("attempt", number))
    else:
        try:
            prepare()
        except files.DamagedFile as error:
            raise _refused(run_dir, status, "user_error", str(error)) from error
    (run_dir / files.STOP).unlink(missing_ok=True)
    (run_dir / files.LOGS / str(number)).mkdir(parents=True, exist_ok=True)
    publish.link(run_dir / files.LATEST_LOGS, str(number))
    # The end of the attempt adds a line to it.
    (run_dir / files.ATTEMPTS).touch()
    log = run_dir / files.JOB_LOG
    started = {
        "state": "RUNNING",
        "attempt": number,
        "nodes": hosts,
        "gpus": allocation.gpus(),
        "started": time.time(),
        "saved_at_start": history.saved_work(run_dir),
        "job_log_bytes": log.stat().st_size if log.exists() else 0,
        **({"rollout_nodes": list(rollout_hosts)} if rollout_hosts else {}),
    }
    _write_status(run_dir, {**started, **allocation.this_process()})
    return number


def _refuse_what_is_done(run_dir: Path, status: dict[str, Any]) -> None:
    """Raise what follows if nothing is left to train, or not by this job."""
    job_id, again = own_job_id(), f"cookbook resume {run_dir.name}"
    if _cancelled(run_dir, job_id):
        raise Follows("failed", f"this job was cancelled; continue with: {again}")
    restarts = int(status.get("restart_count", 0))
    if status.get("job_id") == job_id and restarts > this_job()["restart_count"]:
        message = f"this start of job {job_id} ends: {_owner(status)} has the run"
        raise Follows("superseded", message)
    if read_object(run_dir / files.PROGRESS).get("state") == "finished":
        completed = {**status, **this_job(), "state": "COMPLETED"}
        _write_status(run_dir, completed, files.renew_json)
        what = f"the run {run_dir.name} is finished already, nothing is left to train"
        raise Follows("finished", f"{what}; make a new run with: cookbook submit")


def _end_of_earlier(
    run_dir: Path, status: dict[str, Any], max_retries: int, exists: Callable[[str], bool]
) -> None:
    """Record the end of an attempt that could not: its node was lost, or Slurm requeued the job."""
    before = status.get("job_id")
    # Whether a process of this host runs is known without Slurm.
    runs = before not in (None, own_job_id()) and not allocation.process_ended(status)
    if runs and (str(before).startswith(LOCAL_PREFIX) or exists(str(before))):
        first = f"to start it again, cancel that job first: cookbook cancel {run_dir.name}"
        raise Follows("failed", f"job {before} still works on this run: {first}")
    log = _log_of(run_dir, status)
    nodes = job_log.lost_nodes(log)
    if not _has_line(run_dir, status):
        lost = ended_by_slurm(job_log.ended(log, str(before)), nodes)
        _append_attempt(run_dir, status, None, lost, nodes)
    fruitless = history.count_fruitless(run_dir)
    if fruitless > (max_retries or _MAX_LOST):
        message = f"{fruitless} attempts saved nothing new, the last of them ended without a record"
        again = f"continue with: cookbook resume {run_dir.name}"
        raise _refused(run_dir, status, "lost", f"{message}; {again}")


def end(
    run_dir: Path,
    attempt: int | None,
    exit_code: int,
    max_retries: int = 0,
    job_state: str | None = None,
    stop_asked: bool = False,
    ended: float | None = None,
    settle: Callable[[int, int, bool], object] = lambda *ended: None,
) -> str:
    """Record the end of an attempt; return what the job script does next (Verdict.next).

    An end that is already recorded is not changed.

    Args:
        attempt: None for the one that this start of the job has begun, if any.
        job_state: Slurm's state of the job if Slurm is ending it; for COMPLETING the reason is
            taken from the job's log.
        stop_asked: the ranks were asked to stop; they remove the stop file.
        ended: the time of the end, if it is not now.
        settle: Companion.settle.
    """
    full = faults.full_disk(run_dir)
    status = read_object(run_dir / files.STATUS)
    if (follows := _recorded(run_dir, status, attempt, job_state)) is not None:
        return follows
    attempt = int(status["attempt"]) if attempt is None else attempt
    status = {**this_job(), "attempt": attempt, **status, "exit_code": exit_code}
    now, stop_asked = ended or time.time(), stop_asked or (run_dir / files.STOP).exists()
    log = _log_of(run_dir, status)
    errors = [*_errors(run_dir, status, log), *([full] if full else [])]
    try:
        settle(attempt, exit_code, stop_asked)
    except files.DamagedFile as error:
        errors.append(fault(str(error)))
    logs, earlier = run_dir / files.LOGS / str(attempt), attempts_of(run_dir)
    progress = read_progress(run_dir)
    if progress and progress.get("attempt") != attempt:
        progress = {"state": "none"}  # it is of an earlier one
    verdict = decide(
        AttemptEnd(
            exit_code=exit_code,
            progress=progress,
            errors=errors,
            stop_asked=stop_asked,
            cancelled=_cancelled(run_dir, str(status["job_id"])),
            job_state=_why_ended(run_dir, status, job_state),
            can_requeue=allocation.in_slurm(),
            fruitless=0 if gained_by(run_dir, status) else history.count_fruitless(run_dir) + 1,
            max_retries=max_retries,
            not_started=job_log.not_started(log) if not any(logs.glob("node_*.log")) else "",
            cause_before=str(earlier[-1].get("cause")) if earlier else None,
            memory_is_result="SWEEP" in os.environ,
        )
    )
    _write_end(run_dir, {**status, "ended": now}, verdict, faults.unfit(errors))
    return verdict.next


def _recorded(
    run_dir: Path, status: dict[str, Any], attempt: int | None, job_state: str | None
) -> str | None:
    """Return what follows an end that is recorded already, or is another's; None for another."""
    state = status.get("state")
    if attempt is None:
        if not owned(status):
            return "superseded"
        if state == "RETRYING":
            return _end_between(run_dir, status, str(job_state))
        return None if state == "RUNNING" and "attempt" in status else "failed"
    if not owned(status, attempt):
        say(f"attempt {attempt} of job {own_job_id()} writes nothing: {_owner(status)} has the run")
        return "superseded"
    known = {**this_job(), "attempt": attempt, **status}
    if state == "RUNNING" or not _has_line(run_dir, known):
        return None
    if job_state is None:
        return str(status.get("next", "failed"))
    return _end_between(run_dir, known, job_state) if state == "RETRYING" else "failed"


def _errors(run_dir: Path, status: dict[str, Any], log: str) -> list[dict[str, Any]]:
    """Return the faults that an attempt has left; log: the job's since it began."""
    logs = run_dir / files.LOGS / str(status["attempt"])
    errors = [*faults.read_errors(logs), *faults.slurm_errors(log, logs)]
    # A user's own script may have a secret in its exception.
    errors = [{**each, "message": redacted(str(each.get("message", "")))} for each in errors]
    hosts = [str(host) for host in status.get("nodes") or []]
    per_node = int(os.environ.get("LOGS_PER_NODE") or allocation.ranks_per_node())
    return faults.on_nodes(errors, hosts, per_node)


def _write_end(
    run_dir: Path, status: dict[str, Any], verdict: Verdict, bad_nodes: list[str]
) -> None:
    status |= {"state": verdict.state, "cause": verdict.cause}
    status |= {"message": verdict.message, "next": verdict.next}
    # The state first: on a full disk the line may fail.
    _write_status(run_dir, status, files.renew_json)
    try:
        _append_attempt(run_dir, status, status["exit_code"], verdict, bad_nodes)
    except OSError as error:
        if error.errno not in OF_A_DISK:
            raise
        what = f"{run_dir / files.ATTEMPTS} has no line of attempt {status['attempt']}"
        say(f"{what}: {error.strerror}")
    if verdict.message:
        say(f"attempt {status['attempt']}: {verdict.message}")


def _why_ended(run_dir: Path, status: dict[str, Any], job_state: str | None) -> str | None:
    """Return Slurm's final state of the job, from job.log if needed; None if the job continues."""
    if job_state not in job_log.UNCLEAR:
        return job_state
    start = int(status.get("job_log_bytes", 0))
    return job_log.wait_for_end(run_dir / files.JOB_LOG, start, str(status["job_id"]))


def _end_between(run_dir: Path, status: dict[str, Any], job_state: str) -> str:
    """Record that the job ended after one attempt and before the next; return what follows."""
    log = _log_of(run_dir, status)
    lost = [{"type": faults.NODE_FAILURE, "host": node} for node in job_log.lost_nodes(log)]
    cancelled = _cancelled(run_dir, str(status["job_id"]))
    state = _why_ended(run_dir, status, job_state) or ""
    verdict = decide(AttemptEnd(143, {}, lost, cancelled=cancelled, job_state=state))
    between(run_dir, verdict.message, state=verdict.state, cause=verdict.cause)
    return verdict.next


def _refused(run_dir: Path, status: dict[str, Any], cause: str, message: str) -> Follows:
    """Record that no attempt follows; return what to raise."""
    failed = {"state": "FAILED", "cause": cause, "message": message}
    _write_status(run_dir, {**status, **this_job(), **failed})
    return Follows("failed", message)


def _has_line(run_dir: Path, status: dict[str, Any]) -> bool:
    """Whether the status's attempt has its line, which is written last."""
    last = files.read_json_lines(run_dir / files.ATTEMPTS)[-1:]
    keys = ("attempt", "job_id", "restart_count")
    return any(all(line.get(key) == status.get(key) for key in keys) for line in last)


def nodes_to_leave(run_dir: Path, hosts: list[str], silent: Sequence[str] = ()) -> list[str]:
    """Return the nodes of the allocation without which the job has to be requeued.

    Those are silent, which do not answer, or two attempts in a row name them. A new allocation is
    tried at least once: if Slurm did not exclude the node, the job would be requeued forever.
    """
    attempts = attempts_of(run_dir)
    if not any(map(allocation.same_start, attempts)):
        return []
    bad = bad_nodes(attempts) | set(silent)
    return [host for host in hosts if host in bad]


def between(run_dir: Path, message: str = "", **change: str) -> None:
    """Record what has changed between two attempts.

    Args:
        message: what the job waits for, or why it ends.
        change: state and cause.
    """
    status = read_object(run_dir / files.STATUS)
    if owned(status):
        said = {"message": message} if message else {}
        _write_status(run_dir, {**this_job(), **status, **change, **said})
    if message:
        say(message)


def _write_status(
    run_dir: Path, status: dict[str, Any], write: Callable[[Path, Any], None] = files.write_json
) -> None:
    write(run_dir / files.STATUS, {**status, "updated": time.time()})


def _owner(status: dict[str, Any]) -> str:
    return f"attempt {status.get('attempt')} of job {status.get('job_id')}"


def _log_of(run_dir: Path, status: dict[str, Any]) -> str:
    """Return the job's log since the status's attempt began."""
    return job_log.since(run_dir / files.JOB_LOG, int(status.get("job_log_bytes", 0)))


def _append_attempt(
    run_dir: Path,
    status: dict[str, Any],
    exit_code: int | None,
    verdict: Verdict,
    bad_nodes: list[str] | None = None,
) -> None:
    known = ("attempt", "job_id", "restart_count", "nodes", "gpus", "started")
    line = {
        **{key: status.get(key) for key in known},
        "ended": status["ended"] if exit_code is not None else _last_sign(run_dir, status),
        "exit_code": exit_code,
        "cause": verdict.cause,
        "message": verdict.message,
        "node": verdict.node,
        **({"bad_nodes": bad_nodes} if bad_nodes else {}),
        "checkpoint_step": history.latest_checkpoint(run_dir),
        "gained": gained_by(run_dir, status),
    }
    files.append_json_line(run_dir / files.ATTEMPTS, line)


def _last_sign(run_dir: Path, status: dict[str, Any]) -> float:
    """Return the time of the last log line of an attempt that recorded no end."""
    logs = run_dir / files.LOGS / str(status.get("attempt"))
    written = [path.stat().st_mtime for path in logs.glob("*")]
    return max([float(status.get("started") or time.time()), *written])


def _cancelled(run_dir: Path, job_id: str) -> bool:
    """Whether `cookbook cancel` cancelled this job: a later one continues from its checkpoint."""
    return read_object(run_dir / files.CANCELLED).get("job_id") == job_id


class Recorder:
    """The records of a run, and how long they may take."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self._wait_s = run_dir, seconds("RECORD_WAIT_S", 600)

    def __call__(self, write: Callable[..., T], *given: Any, **named: Any) -> T:
        """Return write(run_dir, ...), called again while a file cannot be read or written.

        A filesystem that is missing or read-only for a minute must not end the run.

        Raises:
            NotRecorded: it failed for all that time.
        """
        began, pause_s = time.monotonic(), 1.0
        while True:
            try:
                return write(self.run_dir, *given, **named)
            except OSError as error:
                reason = f"the run's records were not written ({error})"
                if time.monotonic() - began >= self._wait_s:
                    raise NotRecorded(reason) from error
                say(f"{reason}: tried again for up to {self._wait_s:.0f} s")
                time.sleep(min(pause_s, self._wait_s))
                pause_s = min(2 * pause_s, 30)

    def hurry(self) -> None:
        """Let records take a few seconds from now on: Slurm is ending the job."""
        self._wait_s = min(self._wait_s, _LAST_WAIT_S)

    def fail(self, message: str) -> Follows:
        """Record that the run failed between two attempts; return what to raise."""
        self(between, message, state="FAILED")
        return Follows("failed")

    def waiting(self, message: str) -> None:
        """Show what the job waits for between two attempts."""
        with suppress(OSError):
            between(self.run_dir, message)


def seconds(name: str, default: float) -> float:
    """Return a variable that holds seconds."""
    return float(os.environ.get(name) or default)
