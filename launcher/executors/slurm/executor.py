"""Slurm as an executor of job scripts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.executors.job import Job, JobState
from launcher.executors.slurm import jobs
from launcher.executors.slurm.reasons import why_pending


class SlurmExecutor:
    """Runs a job script through sbatch; asks squeue, and sacct for what squeue has forgotten."""

    def start(self, script: Path, token: str) -> dict[str, Any]:
        return {"job_id": jobs.submit(script, token)}

    def states(self, wanted: Sequence[Job]) -> dict[str, JobState]:
        # Recently ended jobs too: squeue would hide them, and accounting is often off.
        queue = jobs.queue(all_states=True)
        by_token, by_id = (
            {getattr(job, key): job for job in queue} for key in ("comment", "job_id")
        )
        queued = {
            job.token: by_id.get(job.job_id or "") or by_token.get(job.token) for job in wanted
        }
        gone = [job for job in wanted if not queued[job.token]]
        accounted = jobs.accounting(job.job_id for job in gone if job.job_id)
        found = {job.token: _ended(job, accounted.get(job.job_id or "")) for job in gone}
        return found | {token: _queued(job) for token, job in queued.items() if job}

    def cancel(self, job: Job) -> None:
        jobs.cancel(str(job.job_id))


def _ended(job: Job, state: str | None) -> JobState:
    if state is None:
        return JobState(None, "nobody", True, "its job is gone from the queue")
    return JobState(state, "sacct", state in jobs.ENDED, "", job.job_id)


def _queued(job: jobs.QueuedJob) -> JobState:
    detail = f"on {job.nodes}" if job.nodes else ""
    if job.state in jobs.HELD or job.reason.startswith("JobHeld"):
        detail = f"{job.reason}: release it with: scontrol release {job.job_id}"
    elif job.state == "PENDING":
        # Slurm's reason is None until its scheduler considers the job for the first time.
        parts = [] if job.reason == "None" else [f"waiting: {why_pending(job.reason)}"]
        parts += [f"start expected {job.start}"] if job.start not in ("", "N/A") else []
        detail = ", ".join(parts)
    return JobState(job.state, "squeue", job.state in jobs.ENDED, detail, job.job_id)
