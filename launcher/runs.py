"""Run directories: the kit's only registry. Making, finding and judging runs."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launcher import paths, slurm, snapshot
from launcher.attempt import read_attempts
from launcher.errors import CookbookError, RunFault, SlurmFault, UnknownRun, nearest
from launcher.render import token

# A run's own words that end it; everything else may still change.
FINAL = frozenset({"COMPLETED", "FAILED", "CANCELLED"})

_RUN_NAME = re.compile(r"\d{8}-\d{6}-[A-Za-z0-9][A-Za-z0-9._-]{0,63}-[0-9a-f]{4}\Z")


@dataclass(frozen=True)
class State:
    """What is known of a run, and who said so: the job itself, squeue, sacct or nobody."""

    word: str
    source: str
    detail: str = ""

    @property
    def final(self) -> bool:
        return self.word in FINAL or self.word in slurm.ENDED


@dataclass(frozen=True)
class Run:
    """A run directory and what its files say."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def submission(self) -> dict[str, Any]:
        """How the run was started: recipe, where, and the jobs that it was given."""
        return paths.read_json(self.path / "submission.json") or {}

    @property
    def status(self) -> dict[str, Any]:
        """The job's own last word, {} where none has started."""
        return paths.read_json(self.path / "status.json") or {}

    @property
    def progress(self) -> dict[str, Any]:
        """The trainer's last word: step, total_steps, losses, newest checkpoint."""
        return paths.read_json(self.path / "progress.json") or {}

    @property
    def attempts(self) -> list[dict[str, Any]]:
        return read_attempts(self.path)

    @property
    def job_id(self) -> str | None:
        """The newest job's id."""
        jobs = self.submission.get("jobs") or []
        newest = str(jobs[-1]["job_id"]) if jobs else None
        at_work = self.status.get("job_id")
        # Submitted by hand, or the launcher died before it wrote the id down.
        return (
            str(at_work)
            if at_work and (newest is None or self.status.get("state") == "RUNNING")
            else newest
        )

    @property
    def is_local(self) -> bool:
        return str(self.job_id).startswith("local-")

    def latest_logs(self) -> Path | None:
        """The folder of the newest attempt's logs, None before the first."""
        link = self.path / "logs" / "latest"
        return link.resolve() if link.exists() else None

    def metrics(self) -> list[dict[str, Any]]:
        """The logged steps in order."""
        return paths.read_json_lines(self.path / "metrics.jsonl")


def runs_root(root: Path) -> Path:
    """Return the folder of all runs, in the shared folder."""
    return root / "runs"


def new_name(label: str) -> str:
    """Return a new run's name: time, label and four random hex digits."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{label}-{secrets.token_hex(2)}"


def create(root: Path, name: str, files: dict[str, str], code: Path | None = None) -> Run:
    """Make a run directory whole, or not at all: its files are written before it gets its name.

    code is a folder of which the run takes a copy.
    """
    temporary = root / f".tmp-{name}"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.mkdir(mode=0o700)
        (temporary / "logs").mkdir(mode=0o700)
        for relative, text in files.items():
            paths.write_atomic(temporary / relative, text)
        if code is not None:
            snapshot.copy(code, temporary / "code")
        os.rename(temporary, root / name)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise RunFault(
            f"cannot make the run directory {root / name}: {error.strerror or error}: set "
            "COOKBOOK_ROOT to a "
            "folder of yours with room, on the shared filesystem"
        ) from error
    except CookbookError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Run(root / name)


def every(root: Path) -> list[Run]:
    """Return all runs, oldest first."""
    if not root.is_dir():
        return []
    return [
        Run(path) for path in sorted(root.iterdir()) if _RUN_NAME.match(path.name) and path.is_dir()
    ]


def find(root: Path, wanted: str) -> Run:
    """Return the run that wanted names: its name, a unique part of it, a job id, or 'last'."""
    known = every(root)
    if wanted == "last":
        if not known:
            raise UnknownRun(
                f"there is no run in {root} yet: start one with: cookbook submit --recipe demo"
            )
        return known[-1]
    exact = [run for run in known if run.name == wanted]
    parts = [run for run in known if wanted and wanted in run.name]
    by_job = [run for run in known if wanted.isdigit() and wanted in job_ids(run)]
    for found in (exact, by_job, parts):
        if len(found) == 1:
            return found[0]
        if found:
            raise UnknownRun(
                f"{len(found)} runs answer to {wanted!r}, such as {found[-1].name} and "
                f"{found[-2].name}: "
                "give more of the name"
            )
    hint = nearest(wanted, [run.name for run in known])
    raise UnknownRun(
        f"no run in {root} answers to {wanted!r}{hint}: list them with: cookbook status"
    )


def job_ids(run: Run) -> set[str]:
    """Return the ids of all jobs that a run has had."""
    ids = {str(job.get("job_id")) for job in run.submission.get("jobs") or []}
    return ids | {str(run.status.get("job_id"))} if run.status.get("job_id") else ids


def states(wanted: list[Run]) -> dict[str, State]:
    """Return each run's state by name, with at most one question to squeue and one to sacct.

    The order is: the job's own final word, squeue, sacct, else UNKNOWN.
    """
    known: dict[str, State] = {}
    asked: list[Run] = []
    for run in wanted:
        own = run.status
        if own.get("state") in FINAL and not _newer_job(run, own):
            known[run.name] = State(own["state"], "status.json", str(own.get("message") or ""))
        elif run.is_local:
            known[run.name] = _local_state(run)
        else:
            asked.append(run)
    if not asked:
        return known
    try:
        # Recently ended jobs too: squeue would hide them, and accounting is often off.
        queue = slurm.queue(all_states=True)
    except SlurmFault as fault:
        for run in asked:
            known[run.name] = State(
                str(run.status.get("state") or "UNKNOWN"), "status.json", fault.faults[0]
            )
        return known
    by_comment = {job.comment: job for job in queue}
    by_id = {job.job_id: job for job in queue}
    gone = []
    for run in asked:
        job = by_id.get(run.job_id or "") or by_comment.get(token(run.name))
        if job is None:
            gone.append(run)
        else:
            known[run.name] = State(job.state, "squeue", _reason(job, run))
    accounted = slurm.accounting(run.job_id for run in gone if run.job_id)
    for run in gone:
        word = accounted.get(run.job_id or "")
        if word:
            known[run.name] = State(word, "sacct", str(run.status.get("message") or ""))
            continue
        own = run.status
        if own.get("state") in FINAL:
            known[run.name] = State(own["state"], "status.json", str(own.get("message") or ""))
            continue
        resume = f"go on with: cookbook resume {run.name}"
        if own.get("state") == "INTERRUPTED":
            known[run.name] = State("INTERRUPTED", "status.json", f"{own.get('message')}; {resume}")
        else:
            last = str(own.get("state") or "not started")
            detail = f"its job is gone from the queue; last word: {last}; {resume}"
            known[run.name] = State("UNKNOWN", "nobody", detail)
    return known


def _newer_job(run: Run, own: dict[str, Any]) -> bool:
    """Whether the run was submitted again after its job wrote its final word."""
    jobs = run.submission.get("jobs") or []
    return bool(jobs) and float(jobs[-1].get("submitted", 0)) > float(own.get("updated", 0))


def _local_state(run: Run) -> State:
    own = run.status
    process = run.submission.get("jobs", [{}])[-1]
    if process_start(int(str(run.job_id).removeprefix("local-"))) == process.get("process_start"):
        return State(
            str(own.get("state") or "RUNNING"), "status.json", "on this host, without Slurm"
        )
    if process.get("host") != socket.gethostname():
        return State(
            str(own.get("state") or "UNKNOWN"), "status.json", f"started on {process.get('host')}"
        )
    return State(
        "FAILED", "this host", f"its process is gone; go on with: cookbook resume {run.name}"
    )


@contextmanager
def locked(run: Run) -> Iterator[None]:
    """Let one command at a time submit or cancel a run."""
    with open(run.path / ".lock", "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunFault(
                f"another cookbook command is at work on {run.name}: try again in a moment"
            ) from error
        yield


def process_start(pid: int) -> str | None:
    """Return when a process started, in ticks since boot: with its id that is its identity."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def reap(pid: int) -> None:
    """Collect a child that has ended, or it would look alive to its parent for ever."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return


def _reason(job: slurm.QueuedJob, run: Run) -> str:
    if job.state == "PENDING":
        # Slurm says None until its scheduler has looked at the job for the first time.
        reason = "" if job.reason == "None" else f"waiting: {slurm.why_pending(job.reason)}"
        start = f", start expected {job.start}" if job.start not in ("", "N/A") else ""
        return f"{reason}{start}".lstrip(", ")
    if job.state in slurm.HELD or job.reason.startswith("JobHeld"):
        return f"{job.reason}: release it with: scontrol release {job.job_id}"
    return str(run.status.get("message") or "") or job.nodes


def age(run: Run) -> str:
    """Return how long ago a run was made, in the largest fitting unit."""
    made = datetime.strptime(run.name[:15], "%Y%m%d-%H%M%S").replace(tzinfo=UTC).timestamp()
    return duration(time.time() - made)


def duration(seconds: float) -> str:
    """Return a length of time as people write it: 42 s, 3 min 10 s, 5 h 2 min, 3 d 4 h."""
    seconds = max(0, int(seconds))
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    if seconds < 86400:
        return f"{seconds // 3600} h {seconds % 3600 // 60} min"
    return f"{seconds // 86400} d {seconds % 86400 // 3600} h"
