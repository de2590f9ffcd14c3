"""Keeps a run's records from inside its job: python -m launcher.attempt begin|end|failed ...

Called by slurm/job.sh with RUN_DIR set; standard library only, for it runs at every attempt.
`begin` prints the attempt's number and a free port, or "finished"; `end` prints what comes next:
finished, failed, run (again, on these nodes) or requeue.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.paths import read_json, read_json_lines, write_json

# Below the range that the kernel hands out by itself, so that nobody takes the port by chance.
_PORTS = range(20000, 32000)


@dataclass(frozen=True)
class Verdict:
    """How an attempt ended, and what the job script does next."""

    state: str
    next: str
    cause: str
    message: str = ""


def decide(
    exit_code: int,
    progress: dict[str, Any],
    errors: list[dict[str, Any]],
    stop_asked: bool,
    cancelled: bool,
    job_state: str | None,
    can_requeue: bool,
    fruitless: int,
    max_retries: int,
    timed_out_s: float | None = None,
) -> Verdict:
    """Judge one attempt.

    progress is the trainer's progress.json ({} where the entry writes none), errors are what ranks
    and nodes left behind, fruitless counts this and the failed attempts right
    before it that brought no newer checkpoint, timed_out_s is the recipe's timeout where the
    attempt reached it.
    """
    trained = progress.get("state")
    if exit_code == 0 and trained in (None, "finished"):
        return Verdict("COMPLETED", "finished", "finished")
    if cancelled or job_state == "CANCELLED":
        return Verdict("CANCELLED", "failed", "cancelled", "cancelled")
    if job_state is not None:
        # Slurm is ending the job by itself; what it ends for want of nodes it also requeues.
        return Verdict(
            "INTERRUPTED", "failed", job_state.lower(), f"Slurm ended the job: {job_state}"
        )
    if timed_out_s is not None:
        message = f"ended by the recipe's timeout of {timed_out_s:.0f} s"
        return Verdict("FAILED", "failed", "timeout", message)
    first = first_error(errors)
    if first and first.get("permanent"):
        return Verdict("FAILED", "failed", "error", describe(first))
    if first:
        cause = "killed" if first.get("type") == "Killed" else "error"
        message = describe(first)
    elif trained == "stopped" or stop_asked:
        cause, message = "time_limit", "stopped before the time limit"
    else:
        cause, message = "killed", f"a rank died without a word (exit status {exit_code})"
    if fruitless > max_retries:
        return Verdict(
            "FAILED", "failed", cause, f"{message}; {fruitless} attempts brought no new checkpoint"
        )
    if trained == "stopped" or stop_asked:
        return Verdict(
            "REQUEUED" if can_requeue else "RETRYING",
            "requeue" if can_requeue else "run",
            cause,
            message,
        )
    return Verdict("RETRYING", "run", cause, message)


def first_error(errors: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the error that the others follow from.

    A permanent one comes first, then a rank that was killed (the others report a broken
    connection, often sooner), then the earliest.
    """

    def weight(error: dict[str, Any]) -> tuple[bool, bool, float]:
        return (
            not error.get("permanent"),
            error.get("type") != "Killed",
            float(error.get("time", 0)),
        )

    return min(errors, key=weight, default=None)


def describe(error: dict[str, Any]) -> str:
    """Return one line that names the rank, the node and the fault."""
    who = f"rank {error['rank']}" if error.get("rank") is not None else "node"
    lines = str(error.get("message", "")).splitlines() or ["no message"]
    return f"{who} on {error.get('host', '?')}: {error.get('type', 'error')}: {lines[0]}"


def read_errors(logs: Path) -> list[dict[str, Any]]:
    """Return what ranks and nodes left behind in an attempt's log folder, in no order."""
    errors = []
    for path in logs.glob("error_*.json"):
        try:
            error = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(error, dict):
            errors.append(error)
    for path in logs.glob("node_*.log"):
        errors += _killed_ranks(path)
    if not errors:
        errors = [error for path in logs.glob("rank_*.log") for error in _last_words(path)]
    return errors


# torchrun's last words of a worker, as ChildFailedError prints them. SIGTERM is what torchrun
# and Slurm themselves send once something has failed, so it explains nothing.
_KILLED = re.compile(
    r"time +: (\S+)\n +host +: (\S+)\n +rank +: (\d+).*\n +exitcode +: -\d+ .*\((SIG(?!TERM)\w+)\)"
)


def _killed_ranks(node_log: Path) -> list[dict[str, Any]]:
    return [
        {
            "rank": int(rank),
            "host": host,
            "time": time.mktime(time.strptime(when, "%Y-%m-%d_%H:%M:%S")),
            "type": "Killed",
            "message": f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else ""),
            "permanent": False,
        }
        for when, host, rank, name in _KILLED.findall(_tail(node_log))
    ]


def _tail(log: Path) -> str:
    """Return the end of a log, "" where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 65536))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


# The last line of a Python traceback, at the beginning of a line.
_EXCEPTION = re.compile(
    r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)): ?(.*)", re.MULTILINE
)


def _last_words(rank_log: Path) -> list[dict[str, Any]]:
    """Return the last exception in the log of a rank that leaves no record: a script's."""
    found = _EXCEPTION.findall(_tail(rank_log))
    number = rank_log.stem.removeprefix("rank_")
    if not found or not number.isdigit():
        return []
    name, message = found[-1]
    # A rank that lost its peers writes last; the one that failed by itself wrote before it.
    return [
        {
            "rank": int(number),
            "host": socket.gethostname(),
            "time": rank_log.stat().st_mtime,
            "type": name,
            "message": message,
            "permanent": False,
        }
    ]


def read_attempts(run_dir: Path) -> list[dict[str, Any]]:
    """Return the ended attempts of a run, oldest first."""
    return read_json_lines(run_dir / "attempts.jsonl")


def latest_checkpoint(run_dir: Path) -> int:
    """Return the step of the newest checkpoint that carries its COMPLETE marker, -1 for none."""
    steps = (
        marker.parent.name.removeprefix("step_")
        for marker in run_dir.glob("checkpoints/step_*/COMPLETE")
    )
    return max((int(step) for step in steps if step.isdigit()), default=-1)


# The three calls ----------------------------------------------------------------------------


def begin(run_dir: Path, hosts: list[str], head: str) -> str:
    status = read_json(run_dir / "status.json") or {}
    job_id = _job_id()
    if _cancelled(run_dir, job_id):
        sys.exit("cookbook: this job was cancelled; go on with: cookbook resume")
    if (read_json(run_dir / "progress.json") or {}).get("state") == "finished":
        write_json(
            run_dir / "status.json", {**status, "state": "COMPLETED", "updated": time.time()}
        )
        print("cookbook: this run is finished already; nothing is left to train", file=sys.stderr)
        return "finished"
    if status.get("state") == "RUNNING":
        if status.get("job_id") != job_id and _alive(str(status.get("job_id"))):
            sys.exit(
                f"cookbook: job {status['job_id']} is still at work on this run: cancel it first"
            )
        # The attempt before had no time for its last word: its node was lost, or the job requeued.
        _append_attempt(
            run_dir, status, None, "lost", "ended without a word: node lost, killed or requeued"
        )
    number = int(status.get("attempt", -1)) + 1
    port = _free_port(head, job_id, number)
    (run_dir / ".stop").unlink(missing_ok=True)
    logs = run_dir / "logs" / str(number)
    logs.mkdir(parents=True, exist_ok=True)
    temporary = run_dir / "logs" / f".latest.{number}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(str(number))
    os.replace(temporary, run_dir / "logs" / "latest")
    write_json(
        run_dir / "status.json",
        {
            "state": "RUNNING",
            "job_id": job_id,
            "restart_count": int(os.environ.get("SLURM_RESTART_COUNT", "0")),
            "attempt": number,
            "nodes": hosts,
            "started": time.time(),
            "updated": time.time(),
            "checkpoint_at_start": latest_checkpoint(run_dir),
        },
    )
    return f"{number} {port}"


def end(
    run_dir: Path,
    attempt: int,
    exit_code: int,
    max_retries: int,
    job_state: str | None,
    timeout_s: float = 0,
) -> str:
    status = read_json(run_dir / "status.json") or {}
    checkpoint = latest_checkpoint(run_dir)
    gained = checkpoint > int(status.get("checkpoint_at_start", -1))
    fruitless = 0
    if not gained:
        fruitless = 1
        for earlier in reversed(read_attempts(run_dir)):
            if earlier.get("gained"):
                break
            fruitless += 1
    progress = read_json(run_dir / "progress.json") or {}
    if progress and progress.get("attempt") != attempt:
        progress = {"state": "none"}  # left by an attempt before: this one never came so far
    verdict = decide(
        exit_code=exit_code,
        progress=progress,
        errors=read_errors(run_dir / "logs" / str(attempt)),
        stop_asked=(run_dir / ".stop").exists(),
        cancelled=_cancelled(run_dir, str(status.get("job_id"))),
        job_state=job_state,
        can_requeue="SLURM_JOB_ID" in os.environ,
        fruitless=fruitless,
        max_retries=max_retries,
        timed_out_s=timeout_s if _timed_out(status, exit_code, timeout_s) else None,
    )
    _append_attempt(run_dir, status, exit_code, verdict.cause, verdict.message)
    ended = {
        **status,
        "state": verdict.state,
        "updated": time.time(),
        "ended": time.time(),
        "exit_code": exit_code,
        "cause": verdict.cause,
        "message": verdict.message,
    }
    write_json(run_dir / "status.json", ended)
    if verdict.message:
        print(f"cookbook: attempt {attempt}: {verdict.message}", file=sys.stderr)
    return verdict.next


def _timed_out(status: dict[str, Any], exit_code: int, timeout_s: float) -> bool:
    spent_s = time.time() - float(status.get("started", time.time()))
    return exit_code != 0 and 0 < timeout_s <= spent_s


def failed(run_dir: Path, cause: str) -> None:
    status = read_json(run_dir / "status.json") or {}
    write_json(
        run_dir / "status.json",
        {**status, "state": "FAILED", "message": cause, "updated": time.time()},
    )
    print(f"cookbook: {cause}", file=sys.stderr)


def _append_attempt(
    run_dir: Path, status: dict[str, Any], exit_code: int | None, cause: str, message: str
) -> None:
    checkpoint = latest_checkpoint(run_dir)
    line = {
        "attempt": status.get("attempt"),
        "job_id": status.get("job_id"),
        "restart_count": status.get("restart_count"),
        "nodes": status.get("nodes"),
        "started": status.get("started"),
        "ended": time.time(),
        "exit_code": exit_code,
        "cause": cause,
        "message": message,
        "checkpoint_step": checkpoint,
        "gained": checkpoint > int(status.get("checkpoint_at_start", -1)),
    }
    with open(run_dir / "attempts.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _cancelled(run_dir: Path, job_id: str) -> bool:
    """Whether `cookbook cancel` meant this very job: a later one goes on from its checkpoint."""
    return (read_json(run_dir / "cancelled.json") or {}).get("job_id") == job_id


def _job_id() -> str:
    return os.environ.get("SLURM_JOB_ID") or f"local-{os.environ['JOB_PID']}"


def _alive(job_id: str) -> bool:
    """Whether another job of this run is there; where Slurm does not say, it is taken to be."""
    if job_id.startswith("local-"):
        return Path(f"/proc/{job_id.removeprefix('local-')}").exists()
    answer = subprocess.run(
        ["squeue", "--noheader", f"--jobs={job_id}", "--format=%T"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if answer.returncode != 0:
        return "Invalid job id" not in answer.stderr
    return bool(answer.stdout.strip())


def _free_port(head: str, job_id: str, attempt: int) -> int:
    """Return a port that nothing listens on here, the first node, begun from the job's id."""
    digits = "".join(filter(str.isdigit, job_id)) or "0"
    start = int(digits) * 31 + attempt
    for offset in range(len(_PORTS)):
        port = _PORTS[(start + offset) % len(_PORTS)]
        try:
            family, _, _, _, _ = socket.getaddrinfo(head, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind(("", port) if family == socket.AF_INET else ("::", port))
            return port
        except socket.gaierror:
            sys.exit(
                f"cookbook: {socket.gethostname()} cannot resolve its own address {head}: mend "
                "NodeAddr in slurm.conf"
            )
        except OSError:
            continue
    sys.exit(
        f"cookbook: no free port between {_PORTS.start} and {_PORTS.stop} on {socket.gethostname()}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    calls = parser.add_subparsers(dest="call", required=True)
    begins = calls.add_parser("begin")
    begins.add_argument("--hosts", required=True)
    begins.add_argument("--head", required=True)
    ends = calls.add_parser("end")
    ends.add_argument("--attempt", type=int, required=True)
    ends.add_argument("--exit-code", type=int, required=True)
    ends.add_argument("--max-retries", type=int, default=0)
    ends.add_argument("--job-state")
    ends.add_argument("--timeout-s", type=float, default=0)
    fails = calls.add_parser("failed")
    fails.add_argument("--cause", required=True)
    given = parser.parse_args()
    run_dir = Path(os.environ["RUN_DIR"])
    if given.call == "begin":
        print(begin(run_dir, given.hosts.split(","), given.head))
    elif given.call == "end":
        print(
            end(
                run_dir,
                given.attempt,
                given.exit_code,
                given.max_retries,
                given.job_state,
                given.timeout_s,
            )
        )
    else:
        failed(run_dir, given.cause)


if __name__ == "__main__":
    main()
