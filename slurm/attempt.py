"""Keeps a run's records from inside its job: python -P -m slurm.attempt begin|end|failed ...

Called by slurm/job.sh at every attempt, with RUN_DIR set; standard library only.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from runspec import files
from runspec.states import LOCAL_PREFIX, process_start
from slurm.faults import fault, read_errors
from slurm.retry import decide

# Below the range from which the kernel takes ports itself, so that nobody gets one by chance.
_PORTS = range(20000, 32000)

_NEW_RUN = "make a new run with: cookbook submit"


def begin(run_dir: Path, hosts: list[str], head: str, ended: str | None = None) -> str:
    """Record the start of an attempt; return one line for the job script.

    That line is the attempt's number and a free port, or "finished" if nothing is left to train,
    or "busy JOB": the script has to ask whether JOB still runs, and to call again with ended=JOB
    if it does not.
    """
    status = files.read_json(run_dir / files.STATUS) or {}
    job_id, before = _job_id(), status.get("job_id")
    if _cancelled(run_dir, job_id):
        sys.exit(f"cookbook: this job was cancelled; continue with: cookbook resume {run_dir.name}")
    if (files.read_json(run_dir / files.PROGRESS) or {}).get("state") == "finished":
        completed = {**status, "state": "COMPLETED", "updated": time.time()}
        files.write_json(run_dir / files.STATUS, completed)
        _say(f"the run {run_dir.name} is finished already, nothing is left to train; {_NEW_RUN}")
        return "finished"
    if status.get("state") == "RUNNING":
        if before not in (job_id, ended) and not _process_ended(status):
            return f"busy {before}"
        # That attempt could not record its end: its node was lost, or Slurm requeued the job.
        message = "its node was lost, or Slurm requeued the job"
        _append_attempt(run_dir, status, None, "lost", message)
    number = int(status.get("attempt", -1)) + 1
    checkpoint = _latest_checkpoint(run_dir)
    if before not in (None, job_id):
        since = f"the checkpoint of step {checkpoint}" if checkpoint >= 0 else "the first step"
        _say(
            f"job {job_id} continues the run of job {before} in {run_dir}, from {since}; {_NEW_RUN}"
        )
    port = _free_port(head, job_id, number)
    (run_dir / files.STOP).unlink(missing_ok=True)
    (run_dir / files.LOGS / str(number)).mkdir(parents=True, exist_ok=True)
    temporary = run_dir / files.LOGS / f".latest.{number}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(str(number))
    os.replace(temporary, run_dir / files.LATEST_LOGS)
    started = {
        "state": "RUNNING",
        "job_id": job_id,
        "restart_count": int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        "attempt": number,
        "nodes": hosts,
        "started": time.time(),
        "updated": time.time(),
        "checkpoint_at_start": checkpoint,
    }
    files.write_json(run_dir / files.STATUS, {**started, **_process(job_id)})
    return f"{number} {port}"


def end(
    run_dir: Path,
    attempt: int,
    exit_code: int,
    max_retries: int = 0,
    job_state: str | None = None,
    timeout_s: float = 0,
    message: str | None = None,
) -> str:
    """Record the end of an attempt; return what the job script does next (Verdict.next).

    Args:
        job_state: Slurm's word for the job if Slurm is ending it.
        timeout_s: the recipe's timeout, 0 for none.
        message: a fault of the job script itself, which a retry cannot fix.
    """
    status = files.read_json(run_dir / files.STATUS) or {}
    fruitless = 0
    if not _gained(run_dir, status):
        attempts = files.read_json_lines(run_dir / files.ATTEMPTS)
        gains = [number for number, line in enumerate(attempts) if line.get("gained")]
        fruitless = len(attempts) - (gains[-1] + 1 if gains else 0) + 1
    progress = files.read_json(run_dir / files.PROGRESS) or {}
    if progress and progress.get("attempt") != attempt:
        progress = {"state": "none"}  # an earlier attempt wrote it: this one did not get so far
    errors = read_errors(run_dir / files.LOGS / str(attempt))
    spent_s = time.time() - float(status.get("started", time.time()))
    timed_out = exit_code != 0 and 0 < timeout_s <= spent_s
    verdict = decide(
        exit_code=exit_code,
        progress=progress,
        errors=[*errors, fault(message)] if message else errors,
        stop_asked=(run_dir / files.STOP).exists(),
        cancelled=_cancelled(run_dir, str(status.get("job_id"))),
        job_state=job_state,
        can_requeue="SLURM_JOB_ID" in os.environ,
        fruitless=fruitless,
        max_retries=max_retries,
        timed_out_s=timeout_s if timed_out else None,
    )
    _append_attempt(run_dir, status, exit_code, verdict.cause, verdict.message)
    now = time.time()
    ended = {
        "state": verdict.state,
        "updated": now,
        "ended": now,
        "exit_code": exit_code,
        "cause": verdict.cause,
        "message": verdict.message,
    }
    files.write_json(run_dir / files.STATUS, {**status, **ended})
    if verdict.message:
        _say(f"attempt {attempt}: {verdict.message}")
    return verdict.next


def failed(run_dir: Path, message: str) -> None:
    """Record that the run failed between two attempts."""
    status = files.read_json(run_dir / files.STATUS) or {}
    status |= {"state": "FAILED", "message": message, "updated": time.time()}
    files.write_json(run_dir / files.STATUS, status)
    _say(message)


def _say(message: str) -> None:
    print(f"cookbook: {message}", file=sys.stderr)


def _append_attempt(
    run_dir: Path, status: dict[str, Any], exit_code: int | None, cause: str, message: str
) -> None:
    known = ("attempt", "job_id", "restart_count", "nodes", "started")
    line = {
        **{key: status.get(key) for key in known},
        "ended": time.time(),
        "exit_code": exit_code,
        "cause": cause,
        "message": message,
        "checkpoint_step": _latest_checkpoint(run_dir),
        "gained": _gained(run_dir, status),
    }
    files.append_json_line(run_dir / files.ATTEMPTS, line)


def _latest_checkpoint(run_dir: Path) -> int:
    """Return the step of the newest complete checkpoint, -1 for none."""
    return max(files.checkpoint_steps(run_dir), default=-1)


def _gained(run_dir: Path, status: dict[str, Any]) -> bool:
    """Whether the attempt of this status brought a newer checkpoint."""
    return _latest_checkpoint(run_dir) > int(status.get("checkpoint_at_start", -1))


def _process_ended(status: dict[str, Any]) -> bool:
    """Whether the attempt ran without Slurm, and its process is not on this host any more."""
    job_id = str(status.get("job_id"))
    if not job_id.startswith(LOCAL_PREFIX):
        return False
    started = process_start(int(job_id.removeprefix(LOCAL_PREFIX)))
    return started is None or started != status.get("process_start")


def _cancelled(run_dir: Path, job_id: str) -> bool:
    """Whether `cookbook cancel` meant this very job: a later one continues from its checkpoint."""
    return (files.read_json(run_dir / files.CANCELLED) or {}).get("job_id") == job_id


def _job_id() -> str:
    return os.environ.get("SLURM_JOB_ID") or f"{LOCAL_PREFIX}{os.environ['JOB_PID']}"


def _process(job_id: str) -> dict[str, str | None]:
    """Return what identifies a job without Slurm, {} for a job of Slurm."""
    if not job_id.startswith(LOCAL_PREFIX):
        return {}
    started = process_start(int(job_id.removeprefix(LOCAL_PREFIX)))
    return {"host": socket.gethostname(), "process_start": started}


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
    for name in ("attempt", "exit-code", "max-retries"):
        ends.add_argument(f"--{name}", type=int, default=0)
    ends.add_argument("--timeout-s", type=float, default=0)
    ends.add_argument("--job-state")
    ends.add_argument("--message")
    calls.add_parser("failed").add_argument("--message", required=True)
    given = vars(parser.parse_args())
    answer = {"begin": begin, "end": end, "failed": failed}[given.pop("call")](
        Path(os.environ["RUN_DIR"]), **given
    )
    if answer:
        print(answer)


if __name__ == "__main__":
    main()
