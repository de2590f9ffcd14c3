"""Job scripts under bash on this host, without Slurm."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher.errors import RunFault
from launcher.slurm.command import environment
from launcher.slurm.job import Job, State
from runspec import files
from runspec.states import LOCAL_PREFIX, process_start

# The job script needs this long at most to end its ranks and write its last state.
_END_S = 40


class LocalExecutor:
    """Runs a job script as a process of this host, in a session of its own."""

    name = "local"
    queued = False

    def title(self, job_id: str | None) -> str:
        return f"process {str(job_id).removeprefix(LOCAL_PREFIX)}"

    def start(
        self, script: Path, token: str, lease: int, earlier: Collection[str], after: str = ""
    ) -> dict[str, Any]:
        with open(script.parent / files.JOB_LOG, "ab") as log:
            process = subprocess.Popen(
                ["bash", str(script)],
                cwd=script.parent,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return {
            "job_id": f"{LOCAL_PREFIX}{process.pid}",
            "process_start": process_start(process.pid),
            "host": socket.gethostname(),
        }

    def states(self, jobs: Sequence[Job]) -> dict[str, State]:
        return {job.token: self._state(job) for job in jobs}

    def _state(self, job: Job) -> State:
        if _elsewhere(job):
            detail = f"it was started on {job.host}, without Slurm: log in there"
            return State("", "nobody", detail, elsewhere=True)
        if _alive(job):
            return State("RUNNING", "this host", "on this host, without Slurm")
        return State("FAILED", "this host", "its process is gone", True)

    def living(self, job: Job, unsure: bool = False) -> dict[str, str]:
        if _elsewhere(job):
            raise RunFault(f"{_pid(job)} is a process of {job.host}: repeat the command there")
        return {str(job.job_id): "RUNNING"} if _alive(job) else {}

    def cancel(self, job: Job, job_ids: Sequence[str]) -> None:
        pid, deadline = _pid(job), time.monotonic() + _END_S
        if _alive(job):
            _signal(pid, signal.SIGTERM)
        while _alive(job):
            if time.monotonic() > deadline:
                _signal(-pid, signal.SIGKILL)
            time.sleep(0.2)


def _pid(job: Job) -> int:
    return int(str(job.job_id).removeprefix(LOCAL_PREFIX))


def _elsewhere(job: Job) -> bool:
    return job.host not in (None, socket.gethostname())


def _alive(job: Job) -> bool:
    """Whether the very process still runs: its id may have been given to another since."""
    started = process_start(_pid(job))
    return started is not None and started == job.process_start


def _signal(pid: int, number: int) -> None:
    """Send a signal to a process, or to a process group if pid is negative."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
