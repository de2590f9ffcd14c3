"""A run that is finished ends, whatever its processes do then."""

import os
import re
import signal
from pathlib import Path

import pytest

from launcher.run.directory import Run
from launcher.run.states import state_of
from slurm.watchdog import Finished
from tests.faults.kit import SHORT, Undisturbed, attempts, ended, trains
from tests.faults.test_recorder import said, start, supervisor
from tests.launcher.kit import Kit, processes_of, report, until
from tests.launcher.slurm.test_job_script import made


def test_only_this_attempts_word_counts(tmp_path: Path):
    progress = tmp_path / "progress.json"
    watch = Finished(progress, attempt=1, wait_s=60)
    assert not watch.look(0) and not watch.look(1000)
    for told in ("", "[]", '{"state": "running", "attempt": 1}', '{"state": "finished"}'):
        progress.write_text(told)
        assert not watch.look(2000) and not watch.look(3000)
    progress.write_text('{"state": "finished", "attempt": 0}')
    assert not watch.look(4000) and not watch.look(5000)
    progress.write_text('{"state": "finished", "attempt": 1}')
    assert not watch.look(6000) and not watch.look(6059)
    progress.unlink()
    assert watch.look(6060)


# The rank stops what has started it, so that its end is not noticed.
STOPS_TORCHRUN = """
import json, os, pathlib, signal, time
run = pathlib.Path(os.environ["RUN_DIR"])
(run / "waits").touch()
while not (run / "go").exists(): time.sleep(0.05)
told = {"state": "finished", "attempt": int(os.environ["COOKBOOK_ATTEMPT"])}
(run / "progress.json").write_text(json.dumps(told))
os.kill(os.getppid(), signal.SIGSTOP)
"""


@pytest.mark.long
def test_a_stopped_torchrun_is_ended_by_a_supervisor_that_was_killed(place, plain_env):
    run = made(place, STOPS_TORCHRUN, shell=False).path
    script = run / "job.sbatch"
    # As for an entry that tells of its steps.
    watched = r"\1\nexport HANG_TIMEOUT_S=0 SIGNAL_LEAD_S=60 FINISH_WAIT_S=1"
    script.write_text(re.sub("(?m)^(export RUN_DIR=.*)", watched, script.read_text()))
    job = start(run, plain_env)
    try:
        until(lambda: (run / "waits").exists(), 30, lambda: report(run))
        os.kill(supervisor(job.pid), signal.SIGKILL)
        (run / "go").touch()
        assert job.wait(timeout=90) == 0, said(run)
        assert state_of(Run(run)).word == "COMPLETED"
        (line,) = attempts(run)
        assert (line["cause"], line["exit_code"] != 0) == ("finished", True)
        until(lambda: not processes_of(run), 60, lambda: f"left over: {processes_of(run)}")
    finally:
        for pid in processes_of(run):
            os.kill(pid, signal.SIGKILL)
        job.wait()


@pytest.mark.long
def test_a_stopped_srun_does_not_keep_the_nodes(user: Kit, undisturbed: Undisturbed):
    _, run = user.submit(*SHORT, "+env.FINISH_WAIT_S='3'")
    trains(run)
    sruns = processes_of(run, "--job-name=attempt-0")
    assert sruns, report(run)
    for pid in sruns:
        os.kill(pid, signal.SIGSTOP)
    (line,) = ended(user, run, "COMPLETED")
    assert line["cause"] == "finished" and line["exit_code"] != 0, report(run)
    assert "its processes are ended" in (run / "logs" / "job.log").read_text()
    undisturbed.is_equalled_by(run)
