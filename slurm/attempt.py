"""Keeps a run's records from inside its job: python -P -m slurm.attempt begin|end|...

Called by slurm/job.sh at every attempt, with RUN_DIR set; standard library only.
"""

import argparse
import errno
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from runspec import files
from runspec.redact import redacted
from runspec.states import LOCAL_PREFIX
from slurm import words
from slurm.faults import fault, no_space, on_nodes, read_errors, slurm_errors, unfit
from slurm.history import (
    attempts_of,
    count_fruitless,
    gained_by,
    latest_checkpoint,
    next_attempt,
    read_object,
    saved_work,
    series_of,
    used_up,
)
from slurm.identity import in_slurm, own_job_id, process_ended, process_of, this_job
from slurm.retry import Verdict, bad_nodes, decide, ended_by_slurm

# Below the range from which the kernel takes ports itself, so that nobody gets one by chance.
_PORTS = range(20000, 32000)

# So many attempts may end without a word if the recipe retries none.
_MAX_LOST = 3

# Enough for the records and the last lines of the log.
_RESERVE_BYTES = 65536

_NEW_RUN = "make a new run with: cookbook submit"


def begin(
    run_dir: Path, hosts: list[str], head: str, ended: str | None = None, max_retries: int = 0
) -> str:
    """Record the start of an attempt; return one line for the job script.

    That line is the attempt's number and a free port, or "finished" if nothing is left to train,
    or "busy JOB": the script has to ask whether JOB still runs, and to call again with ended=JOB
    if it does not. Ends the program if attempts that left no word brought nothing too often.
    """
    status = read_object(run_dir / files.STATUS)
    job_id, before = own_job_id(), status.get("job_id")
    if _cancelled(run_dir, job_id):
        sys.exit(f"cookbook: this job was cancelled; continue with: cookbook resume {run_dir.name}")
    if read_object(run_dir / files.PROGRESS).get("state") == "finished":
        completed = {**this_job(), **status, "state": "COMPLETED", "updated": time.time()}
        files.write_json(run_dir / files.STATUS, completed)
        _say(f"the run {run_dir.name} is finished already, nothing is left to train; {_NEW_RUN}")
        return "finished"
    if status.get("state") == "RUNNING":
        if before not in (job_id, ended) and not process_ended(status):
            return _busy(run_dir, str(before))
        # That attempt could not record its end: its node was lost, or Slurm requeued the job.
        log = words.since(run_dir / files.JOB_LOG, int(status.get("job_log_bytes", 0)))
        number = str(status.get("slurm_job_id") or before)
        lost = ended_by_slurm(words.ended(log, number), words.lost_node(log))
        _append_attempt(run_dir, status, None, lost)
        fruitless = count_fruitless(run_dir)
        if fruitless > (max_retries or _MAX_LOST):
            message = (
                f"{fruitless} attempts saved nothing new, the last of them ended without "
                f"a word; continue with: cookbook resume {run_dir.name}"
            )
            _refuse(run_dir, {**status, **this_job()}, "lost", message)
    if message := used_up(run_dir):
        _refuse(run_dir, {**status, **this_job()}, "budget", message)
    number, series = next_attempt(run_dir, status), series_of(run_dir)
    checkpoint = latest_checkpoint(run_dir)
    if before not in (None, job_id):
        since = f"the checkpoint of step {checkpoint}" if checkpoint >= 0 else "the first step"
        _say(
            f"job {job_id} continues the run of job {before} in {run_dir}, from {since}; {_NEW_RUN}"
        )
    port = _free_port(head, job_id, number)
    (run_dir / files.STOP).unlink(missing_ok=True)
    (run_dir / files.EARLY_STOP).unlink(missing_ok=True)
    (run_dir / files.LOGS / str(number)).mkdir(parents=True, exist_ok=True)
    temporary = run_dir / files.LOGS / f".latest.{number}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(str(number))
    os.replace(temporary, run_dir / files.LATEST_LOGS)
    _keep_room(run_dir)
    started = {
        "state": "RUNNING",
        **this_job(),
        "attempt": number,
        "series": series,
        **{key: status[key] for key in ("successor",) if key in status and before == job_id},
        "nodes": hosts,
        "gpus": _gpus(),
        "started": time.time(),
        "updated": time.time(),
        "saved_at_start": saved_work(run_dir),
        "job_log_bytes": _size(run_dir / files.JOB_LOG),
    }
    files.write_json(run_dir / files.STATUS, {**started, **process_of(job_id)})
    return f"{number} {port}"


def end(
    run_dir: Path,
    attempt: int | None,
    exit_code: int,
    max_retries: int = 0,
    job_state: str | None = None,
    timeout_s: float = 0,
    message: str | None = None,
    stop_asked: bool = False,
) -> str:
    """Record the end of an attempt; return what the job script does next (Verdict.next).

    Args:
        attempt: None for the one that this start of the job has begun, if it has begun any.
        job_state: Slurm's word for the job if Slurm is ending it; COMPLETING says nothing, and the
            job's log is searched.
        timeout_s: the recipe's timeout, 0 for none.
        message: a fault of the job script itself, which a retry cannot fix.
        stop_asked: the script has asked the ranks to stop; they remove the file that says so.
    """
    full = _is_full(run_dir)
    (run_dir / files.RESERVE).unlink(missing_ok=True)
    status = read_object(run_dir / files.STATUS)
    if attempt is None:
        if status.get("state") != "RUNNING" or not _owned(status):
            return "failed"
        attempt = int(status["attempt"])
    if not _owned(status, attempt):
        _say(
            f"attempt {attempt} of job {own_job_id()} writes nothing: {_owner(status)} has the run"
        )
        return "failed"
    status = {**this_job(), "attempt": attempt, **status}
    job_id, logs = str(status["job_id"]), run_dir / files.LOGS / str(attempt)
    log = words.since(run_dir / files.JOB_LOG, int(status.get("job_log_bytes", 0)))
    if job_state in words.UNCLEAR:
        job_state = words.wait_for_end(
            run_dir / files.JOB_LOG,
            int(status.get("job_log_bytes", 0)),
            str(status.get("slurm_job_id") or job_id),
        )
    hosts = [str(host) for host in status.get("nodes") or []]
    errors = [*read_errors(logs), *slurm_errors(log, logs)]
    # A script of the user's own may have put anything into its exception.
    errors = [{**each, "message": redacted(str(each.get("message", "")))} for each in errors]
    errors = on_nodes(errors, hosts, _ranks_per_node())
    if message:
        errors.append(fault(message))
    elif full:
        errors.append(no_space(run_dir))
    progress = read_object(run_dir / files.PROGRESS)
    if progress and progress.get("attempt") != attempt:
        progress = {"state": "none"}  # an earlier attempt wrote it: this one did not get so far
    spent_s = time.time() - float(status.get("started", time.time()))
    timed_out = exit_code != 0 and 0 < timeout_s <= spent_s
    gained = gained_by(run_dir, status)
    earlier, now = attempts_of(run_dir), time.time()
    verdict = decide(
        exit_code=exit_code,
        progress=progress,
        errors=errors,
        stop_asked=stop_asked or (run_dir / files.STOP).exists(),
        cancelled=_cancelled(run_dir, job_id),
        job_state=job_state,
        can_requeue=in_slurm(),
        succeeds="successor" in status,
        fruitless=0 if gained else count_fruitless(run_dir) + 1,
        max_retries=max_retries,
        timed_out_s=timeout_s if timed_out else None,
        not_started=words.not_started(log) if not any(logs.glob("node_*.log")) else "",
        cause_before=str(earlier[-1].get("cause")) if earlier else None,
        used_up=used_up(run_dir, {**status, "ended": now}),
        memory_is_result="SWEEP_DIR" in os.environ,
        worse=str(read_object(run_dir / files.EARLY_STOP).get("message") or ""),
    )
    ended = {
        "state": verdict.state,
        "updated": now,
        "ended": now,
        "exit_code": exit_code,
        "cause": verdict.cause,
        "message": verdict.message,
    }
    # The state first: a disk that is full may take no more.
    files.write_json(run_dir / files.STATUS, {**status, **ended})
    _append_attempt(run_dir, status, exit_code, verdict, unfit(errors))
    if verdict.message:
        _say(f"attempt {attempt}: {verdict.message}")
    return verdict.next


def _refuse(run_dir: Path, status: dict[str, Any], cause: str, message: str) -> NoReturn:
    """Record that no attempt follows, and end the program."""
    failed = {"state": "FAILED", "cause": cause, "message": message, "updated": time.time()}
    files.write_json(run_dir / files.STATUS, {**status, **failed})
    sys.exit(f"cookbook: {message}")


def _busy(run_dir: Path, job_id: str) -> str:
    """Return what begin answers; a process of this host needs no question to Slurm."""
    if job_id.startswith(LOCAL_PREFIX):
        sys.exit(
            f"cookbook: job {job_id} still works on this run: to start it again, cancel that job "
            f"first: cookbook cancel {run_dir.name}"
        )
    return f"busy {job_id}"


def choose(run_dir: Path, hosts: list[str], nodes: int, silent: list[str] | None = None) -> str:
    """Return which nodes of the allocation the next attempt uses: "use n1,n2" or "without n3".

    A node is left out if it does not answer, or if two attempts in a row name it. A new allocation
    is tried at least once: if Slurm did not exclude the node, the job would be requeued without
    end.

    Args:
        hosts: the allocation's nodes. nodes: how many of them are needed.
        silent: those that do not answer.
    """
    attempts = attempts_of(run_dir)
    bad = bad_nodes(attempts) | set(silent or [])
    good = [host for host in hosts if host not in bad]
    mine = this_job()
    tried = any(
        str(line.get("job_id")) == mine["job_id"]
        and line.get("restart_count") == mine["restart_count"]
        for line in attempts
    )
    if len(good) >= nodes or not tried:
        return f"use {','.join((good if len(good) >= nodes else hosts)[:nodes])}"
    return f"without {','.join(host for host in hosts if host in bad)}"


def failed(run_dir: Path, message: str) -> None:
    """Record that the run failed between two attempts."""
    _between(run_dir, {"state": "FAILED", "message": message})
    _say(message)


def waiting(run_dir: Path, message: str) -> None:
    """Record what the job waits for between two attempts."""
    _between(run_dir, {"message": message})
    _say(message)


def succeed(run_dir: Path, job: str) -> None:
    """Record which job takes this one's place if it does not end well."""
    _between(run_dir, {"successor": job})


def _between(run_dir: Path, change: dict[str, Any]) -> None:
    status = read_object(run_dir / files.STATUS)
    if _owned(status):
        files.write_json(run_dir / files.STATUS, {**status, **change, "updated": time.time()})


def _owned(status: dict[str, Any], attempt: int | None = None) -> bool:
    """Whether the record is of this very start of this job, or of no job at all.

    A job whose node was lost may still run beside the one that took its place.
    """
    if "job_id" not in status:
        return True
    mine = this_job()
    newer = attempt is not None and int(status.get("attempt", -1)) > attempt
    return not newer and all(
        str(status.get(key, mine[key])) == str(mine[key]) for key in ("job_id", "restart_count")
    )


def _owner(status: dict[str, Any]) -> str:
    return f"attempt {status.get('attempt')} of job {status.get('job_id')}"


def _ranks_per_node() -> int:
    return max(1, int(os.environ.get("RANKS_PER_NODE", "1")))


def _gpus() -> int:
    """Number of GPUs of the allocation, or of ranks; spare nodes are paid for, too."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES") or os.environ.get("NODES") or "1"
    return int(nodes) * _ranks_per_node()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _keep_room(run_dir: Path) -> None:
    """Keep space for the last word of a run that fills the disk."""
    with suppress(OSError):
        (run_dir / files.RESERVE).write_bytes(b"0" * _RESERVE_BYTES)


def _is_full(run_dir: Path) -> bool:
    """Whether the disk takes nothing more."""
    probe = run_dir / f".probe.{os.getpid()}"
    try:
        probe.write_bytes(b"0" * _RESERVE_BYTES)
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    return False


def _say(message: str) -> None:
    # The log may be on a disk that is full.
    with suppress(OSError):
        print(f"cookbook: {message}", file=sys.stderr)


def _append_attempt(
    run_dir: Path,
    status: dict[str, Any],
    exit_code: int | None,
    verdict: Verdict,
    bad_nodes: list[str] | None = None,
) -> None:
    known = ("attempt", "job_id", "restart_count", "series", "nodes", "gpus", "started")
    line = {
        **{key: status.get(key) for key in known},
        "ended": time.time() if exit_code is not None else _last_sign(run_dir, status),
        "exit_code": exit_code,
        "cause": verdict.cause,
        "message": verdict.message,
        "node": verdict.node,
        **({"bad_nodes": bad_nodes} if bad_nodes else {}),
        "checkpoint_step": latest_checkpoint(run_dir),
        "gained": gained_by(run_dir, status),
    }
    files.append_json_line(run_dir / files.ATTEMPTS, line)


def _last_sign(run_dir: Path, status: dict[str, Any]) -> float:
    """Return when an attempt that recorded no end wrote into its logs last."""
    logs = run_dir / files.LOGS / str(status.get("attempt"))
    written = [path.stat().st_mtime for path in logs.glob("*")]
    return max([float(status.get("started") or time.time()), *written])


def _cancelled(run_dir: Path, job_id: str) -> bool:
    """Whether `cookbook cancel` meant this very job: a later one continues from its checkpoint."""
    return read_object(run_dir / files.CANCELLED).get("job_id") == job_id


def _free_port(head: str, job_id: str, attempt: int) -> int:
    """Return a free port of this host, the first node; the search starts from the job's id."""
    start = int("".join(filter(str.isdigit, job_id)) or "0") * 31 + attempt
    here = socket.gethostname()
    try:
        family = socket.getaddrinfo(head, None, type=socket.SOCK_STREAM)[0][0]
    except socket.gaierror:
        sys.exit(f"cookbook: {here} cannot resolve its address {head}: fix NodeAddr in slurm.conf")
    for offset in range(len(_PORTS)):
        port = _PORTS[(start + offset) % len(_PORTS)]
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(("", port))
            return port
    sys.exit(f"cookbook: no free port between {_PORTS.start} and {_PORTS.stop} on {here}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    calls = parser.add_subparsers(dest="call", required=True)
    begins, ends = calls.add_parser("begin"), calls.add_parser("end")
    begins.add_argument("--hosts", required=True, type=lambda text: text.split(","))
    begins.add_argument("--head", required=True)
    begins.add_argument("--ended")
    begins.add_argument("--max-retries", type=int, default=0)
    ends.add_argument("--attempt", type=int)
    for name in ("exit-code", "max-retries"):
        ends.add_argument(f"--{name}", type=int, default=0)
    ends.add_argument("--timeout-s", type=float, default=0)
    ends.add_argument("--job-state")
    ends.add_argument("--message")
    ends.add_argument("--stop-asked", action="store_true")
    chooses = calls.add_parser("choose")
    chooses.add_argument("--hosts", required=True, type=lambda text: text.split(","))
    chooses.add_argument("--nodes", required=True, type=int)
    chooses.add_argument("--silent", type=lambda text: [name for name in text.split(",") if name])
    calls.add_parser("succeed").add_argument("--job", required=True)
    for name in ("failed", "waiting"):
        calls.add_parser(name).add_argument("--message", required=True)
    given = vars(parser.parse_args())
    answers = {call.__name__: call for call in (begin, end, choose, succeed, failed, waiting)}
    run_dir = Path(os.environ["RUN_DIR"])
    try:
        answer = answers[given.pop("call")](run_dir, **given)
    except OSError as error:
        _say(f"the records of {run_dir} cannot be written: {error}")
        sys.exit(1)
    if answer:
        print(answer)


if __name__ == "__main__":
    main()
