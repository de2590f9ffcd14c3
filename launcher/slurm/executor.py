"""Slurm as an executor of job scripts."""

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import RunFault, SlurmFault, SlurmTimeout
from launcher.slurm import cluster, jobs
from launcher.slurm.job import Job, State
from launcher.slurm.reasons import why_pending

# A controller that was busy reads the request of an sbatch that has ended within this time.
_LATE_S = 3


class SlurmExecutor:
    """Runs a job script through sbatch; asks squeue, and sacct for what squeue has forgotten.

    A job is a run's if its comment is the run's token. Its id alone says nothing: another cluster,
    or a new database, gives it to another job.
    """

    name = "slurm"
    queued = True

    def title(self, job_id: str | None) -> str:
        return f"job {job_id}" if job_id else "no job"

    def start(
        self, script: Path, token: str, lease: int, earlier: Collection[str], after: str = ""
    ) -> dict[str, Any]:
        here = _here()
        job_id = jobs.submit(script, token, lease, earlier, after)
        return {"job_id": job_id, **(here or _here())}

    def states(self, wanted: Sequence[Job]) -> dict[str, State]:
        # Recently ended jobs too: squeue would hide them, and accounting is often off.
        queue = _by_token(jobs.queue())
        queued = {job.token: _newest(queue.get(job.token, []), job.job_id) for job in wanted}
        known = {token: _queued(job) for token, job in queued.items() if job}
        for job in wanted:
            if job.token not in known and (place := _elsewhere(job)):
                known[job.token] = State("", "nobody", place, elsewhere=True)
        gone = [job for job in wanted if job.token not in known]
        accounted = jobs.accounting(job.job_id for job in gone if job.job_id)
        return known | {job.token: _ended(job, accounted.get(job.job_id or "")) for job in gone}

    def living(self, job: Job, unsure: bool = False) -> dict[str, str]:
        alive = _living(job)
        if not alive and unsure:
            time.sleep(_LATE_S)
            alive = _living(job)
        if not alive and (place := _elsewhere(job)):
            raise RunFault(f"job {job.job_id}: {place}, and repeat the command")
        return alive

    def cancel(self, job: Job, job_ids: Sequence[str]) -> None:
        try:
            jobs.cancel(job_ids)
        except SlurmTimeout:
            raise
        except SlurmFault:
            # One of them may have ended a moment ago, which Slurm calls an error.
            if any(state != "COMPLETING" for state in _living(job).values()):
                raise


def _here() -> dict[str, str]:
    """Return what identifies this cluster, {} if its controller does not say."""
    try:
        return cluster.identity()
    except SlurmFault:
        return {}


def _elsewhere(job: Job) -> str:
    """Say to which other cluster a job belongs and how to reach it; "" if it is this one."""
    here = _here()
    if not here or not job.cluster:
        return ""
    same_controller = job.controller in (None, here["controller"])
    if job.cluster == here["cluster"] and same_controller:
        return ""
    if job.slurm_conf:
        how = f"export SLURM_CONF={job.slurm_conf}"
    else:
        how = "unset SLURM_CONF, or log in there" if "slurm_conf" in here else "log in there"
    return (
        f"it belongs to cluster {job.cluster} (controller {job.controller or 'unknown'}), and this "
        f"is cluster {here['cluster']} (controller {here['controller']}): {how}"
    )


def _by_token(queue: Sequence[jobs.QueuedJob]) -> dict[str, list[jobs.QueuedJob]]:
    """Return the jobs by their comment, the oldest first."""
    by_token: dict[str, list[jobs.QueuedJob]] = {}
    for job in sorted(queue, key=lambda each: int(each.job_id)):
        by_token.setdefault(job.comment, []).append(job)
    return by_token


def _living(job: Job) -> dict[str, str]:
    queue = _by_token(jobs.queue())
    return {
        each.job_id: each.state for each in queue.get(job.token, []) if each.state not in jobs.ENDED
    }


def _newest(queued: Sequence[jobs.QueuedJob], job_id: str | None) -> jobs.QueuedJob | None:
    """Return the job of a run that counts: one that lives, else the one with job_id.

    If job_id is None nobody wrote it down, and the last one counts.
    """
    living = [job for job in queued if job.state not in jobs.ENDED]
    known = [job for job in living or queued if job.job_id == job_id]
    if not known and (living or job_id is None):
        known = list(living or queued)
    return known[-1] if known else None


def _ended(job: Job, state: str | None) -> State:
    if state is None:
        return State("", "nobody", "its job is gone from the queue", True)
    return State(state, "sacct", "", state in jobs.ENDED, job.job_id)


def _queued(job: jobs.QueuedJob) -> State:
    detail = f"on {job.nodes}" if job.nodes else ""
    if job.state in jobs.HELD or job.reason.startswith("JobHeld"):
        detail = f"{job.reason}: release it with: scontrol release {job.job_id}"
    elif job.state == "PENDING":
        # Slurm's reason is None until its scheduler considers the job for the first time.
        parts = [] if job.reason == "None" else [f"waiting: {why_pending(job.reason)}"]
        parts += [f"start expected {job.start}"] if job.start not in ("", "N/A") else []
        detail = ", ".join(parts)
    elif job.state in jobs.ENDED and job.reason not in ("", "None"):
        detail = ", ".join(filter(None, [detail, job.reason]))
    return State(job.state, "squeue", detail, job.state in jobs.ENDED, job.job_id)
