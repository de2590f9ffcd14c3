"""A job that takes the place of one that Slurm does not put back into the queue."""

import pytest

from tests.faults.kit import SHORT, Undisturbed, attempts, ended, trains
from tests.launcher.kit import Kit, report


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
