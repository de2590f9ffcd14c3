"""A run that is finished ends, whatever its processes do then."""

import json
import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from launcher import paths
from launcher.run.directory import Run
from launcher.run.states import state_of
from runspec.states import process_start
from slurm.watchdog import Finished
from tests.faults.kit import SHORT, Undisturbed, attempts, ended, parent, processes_of, rank, trains
from tests.faults.test_recorder import said, start, supervisor
from tests.launcher.kit import Kit, report, until
from tests.launcher.slurm.test_job_script import SUPERVISE, made


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
told = {"state": "finished", "attempt": int(os.environ["ATTEMPT"])}
(run / "progress.json").write_text(json.dumps(told))
os.kill(os.getppid(), signal.SIGSTOP)
"""


@pytest.mark.long
def test_a_stopped_torchrun_is_ended_by_a_supervisor_that_was_killed(place, plain_env):
    run = made(place, STOPS_TORCHRUN).path
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
    job = json.loads((run / "status.json").read_text())["job_id"]
    wanted = {b"srun", b"--job-name=attempt-0"}
    sruns = [
        pid
        for pid in processes_of(run)
        if wanted <= set(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))
    ]
    assert rank(run, 0) and parent(rank(run, 0)) and sruns, (job, report(run))
    for pid in sruns:
        os.kill(pid, signal.SIGSTOP)
    (line,) = ended(user, run, "COMPLETED")
    assert line["cause"] == "finished" and line["exit_code"] != 0, report(run)
    assert "its processes are ended" in (run / "logs" / "job.log").read_text()
    undisturbed.is_equalled_by(run)


QUICK = ["--recipe", "demo", "--nodes", "2", "--gpus-per-node", "1", "max_steps=2"]


@pytest.mark.long
def test_answers_can_be_given_up(user: Kit):
    _, run = user.submit(*QUICK)
    user.wait(run, "ANSWERING")
    done = user.cookbook("cancel", run.name)
    assert done.returncode == 0 and "is COMPLETED and stays so" in done.stdout, done.stdout
    status = until(lambda: answered(run), 60, lambda: report(run))
    assert "the questions were given up; the run is finished" in status["message"]
    assert status["answers"]["gpus"] == 2 and status["answers"]["seconds"] > 0
    assert status["state"] == "COMPLETED" and (run / "export/config.json").is_file()
    assert not (run / "samples.jsonl").exists() and not (run / "cancelled.json").exists()
    (line,) = attempts(run)
    assert line["cause"] == "finished" and line["exit_code"] == 0
    until(lambda: not processes_of(run), 60, lambda: f"left over: {processes_of(run)}")
    assert user.status(run)["state"] == "COMPLETED"


@pytest.mark.long
def test_a_fault_in_the_answers_is_a_warning(tmp_path: Path, plain_env):
    kit = Kit(plain_env | {"COOKBOOK_ROOT": str(tmp_path)}, tmp_path)
    _, run = kit.submit(*QUICK, "--local")
    until(lambda: json_of(run).get("answering"), 120, lambda: report(run))
    assert (json_of(run)["state"], state_of(Run(run)).word) == ("COMPLETED", "ANSWERING")
    (run / "export/config.json").unlink()
    status = until(lambda: answered(run), 60, lambda: report(run))
    assert "exit status 1" in status["message"] and status["state"] == "COMPLETED"
    until(lambda: not processes_of(run), 30, lambda: f"left over: {processes_of(run)}")
    assert "warning: the questions were not answered" in (run / "logs/job.log").read_text()
    assert state_of(Run(run)).word == "COMPLETED"


def test_answers_outlive_ranks_that_had_to_be_ended_on_a_node_that_is_given_back(
    tmp_path: Path, plain_env
):
    logs = tmp_path / "logs" / "0"
    logs.mkdir(parents=True)
    (logs / ".end_ranks").touch()
    env = plain_env | {"RUN_DIR": str(tmp_path), "NODES": "2", "MAX_RETRIES": "0"}
    env |= {"COOKBOOK": str(paths.REPO_ROOT), "PYTHONPATH": str(paths.REPO_ROOT)}
    env |= {"JOB_PID": str(os.getpid()), "COOKBOOK_AGAIN": "yes", "HEAD_ADDR": "192.0.2.1"}
    env |= {"ANSWER_SCRIPT": "echo $HEAD_ADDR; ls -A $LOGS"}
    own = {"job_id": f"local-{os.getpid()}", "process_start": process_start(os.getpid())}
    status = {"state": "COMPLETED", "next": "finished", "attempt": 0, "restart_count": 0, **own}
    status |= {"host": socket.gethostname(), "nodes": ["n1"], "answering": {"started": 1}}
    (tmp_path / "status.json").write_text(json.dumps(status))
    subprocess.run(SUPERVISE, env=env, timeout=60, check=True)
    address, *there = (logs / "node_0.log").read_text().split()
    assert address == "127.0.0.1" and there and ".end_ranks" not in there
    assert json_of(tmp_path)["answers"]["ended"] and "message" not in json_of(tmp_path)


def json_of(run: Path) -> dict:
    path = run / "status.json"
    return json.loads(path.read_text()) if path.exists() else {}


def answered(run: Path) -> dict | None:
    """The status once the questions are done with."""
    status = json_of(run)
    return status if "ended" in status and "answering" not in status else None
