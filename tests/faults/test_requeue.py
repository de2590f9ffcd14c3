"""A job that Slurm does not put back into the queue."""

import pytest

from tests.faults.kit import SHORT, Undisturbed, ended, trains
from tests.launcher.kit import Kit, report


@pytest.mark.long
def test_a_refused_requeue_names_the_command_that_continues(
    user: Kit, slurm, undisturbed: Undisturbed
):
    job, run = user.submit(*SHORT)
    trains(run)
    slurm.run(["scontrol", "update", f"JobId={job}", "Requeue=0"])
    slurm.run(["scancel", "--batch", "--signal=USR1", job])
    (line,) = ended(user, run, "FAILED")
    assert (line["job_id"], line["cause"]) == (job, "time_limit"), report(run)
    again = f"continue with: cookbook resume {run.name}"
    assert again in user.status(run)["detail"]
    assert user.cookbook("resume", run.name).returncode == 0
    ended(user, run, "COMPLETED")
    undisturbed.is_equalled_by(run)
