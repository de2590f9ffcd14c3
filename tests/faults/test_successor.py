"""Jobs that take the place of others where a job may not go back into the queue."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import site_of
from tests.faults.kit import SHORT, Undisturbed, attempts, ended, parent, rank, trains
from tests.launcher.kit import Kit, report, until


@pytest.fixture(scope="module")
def no_requeue(user: Kit) -> Iterator[str]:
    """The name of a site where jobs may not go back into the queue."""
    with site_of(user, "requeue: false") as site:
        yield site


def queue(slurm, run: Path) -> list[str]:
    """The jobs of a run that wait or run."""
    said = slurm.run(["squeue", "--noheader", "--format=%i %k"]).stdout
    return sorted(line.split()[0] for line in said.splitlines() if line.endswith(f":{run.name}"))


def batch_script(run: Path) -> int:
    """The process of the job script, above srun or what starts the nodes."""
    pid = rank(run, 0)
    while b"slurm_script" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        pid = parent(pid)
    return pid


@pytest.mark.long
def test_a_refused_requeue_is_answered_by_another_job(user: Kit, slurm, undisturbed: Undisturbed):
    job, run = user.submit(*SHORT)
    trains(run)
    slurm.run(["scontrol", "update", f"JobId={job}", "Requeue=0"])
    slurm.run(["scancel", "--batch", "--signal=USR1", job])
    first, second = ended(user, run, "COMPLETED")
    assert (first["job_id"], first["cause"]) == (job, "time_limit"), report(run)
    assert int(second["job_id"]) > int(job) and second["series"] == job
    assert "takes the place of this one" in (run / "logs" / "job.log").read_text()
    undisturbed.is_equalled_by(run)


@pytest.mark.long
def test_the_successor_goes_on_for_a_batch_script_that_was_killed(
    user: Kit, slurm, undisturbed: Undisturbed, no_requeue
):
    job, run = user.submit(*SHORT, "--cluster", no_requeue)
    trains(run)
    assert "#SBATCH --no-requeue" in (run / "job.sbatch").read_text()
    first, successor = queue(slurm, run)
    assert first == job
    assert user.status(run)["job_id"] == job, "the one that runs counts"
    slurm.run(["scancel", "--batch", "--signal=KILL", job])
    lines = ended(user, run, "COMPLETED")
    assert [line["cause"] for line in lines] == ["lost", "finished"], report(run)
    assert lines[1]["job_id"] == successor and lines[1]["series"] == job
    until(lambda: not queue(slurm, run), 30, lambda: str(queue(slurm, run)))
    undisturbed.is_equalled_by(run)


@pytest.mark.parametrize("how", ["scancel", "cookbook cancel"])
@pytest.mark.long
def test_a_cancelled_job_leaves_no_successor(user: Kit, slurm, no_requeue, how):
    job, run = user.submit(*SHORT, "--cluster", no_requeue)
    trains(run)
    successor = queue(slurm, run)[1]
    if how == "scancel":
        slurm.run(["scancel", job])
    else:
        assert user.cookbook("cancel", run.name).returncode == 0
    ended(user, run, "CANCELLED", timeout=60)
    until(lambda: not queue(slurm, run), 30, lambda: report(run))
    # It would end by itself, after it had waited for a node.
    told = slurm.run(["scontrol", "show", "job", successor]).stdout
    assert "JobState=CANCELLED" in told and "BatchHost" not in told, told


def test_a_series_counts_its_attempts_together_and_a_resumed_run_anew(tmp_path, monkeypatch):
    from slurm import records

    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    (tmp_path / "logs").mkdir()
    for number, job in enumerate(["11", "12", "13"]):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        records.begin(tmp_path, ["n1"])
        records.between(tmp_path, successor=str(int(job) + 1))
        follows = records.end(tmp_path, number, 1, max_retries=2)
        assert follows == ("failed" if number == 2 else "run")
    assert [line["series"] for line in attempts(tmp_path)] == ["11"] * 3
    monkeypatch.setenv("SLURM_JOB_ID", "20")
    records.begin(tmp_path, ["n1"])
    assert records.end(tmp_path, 3, 1, max_retries=2) == "run"
