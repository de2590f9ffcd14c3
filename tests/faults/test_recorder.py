"""Records that cannot be kept for a while, or at all: the job goes on, or has its last word."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launcher import paths
from launcher.run.directory import Run
from launcher.run.states import state_of
from slurm import history, records
from slurm.records import NotRecorded, Recorder
from tests.faults.kit import attempts
from tests.launcher.kit import report, until
from tests.launcher.slurm.test_job_script import made

# The first attempt fails once the test has done its harm, the second passes.
TWICE = """
import os, pathlib, sys, time
run = pathlib.Path(os.environ["RUN_DIR"])
if os.environ["COOKBOOK_ATTEMPT"] == "0":
    (run / "harm.me").touch()
    while not pathlib.Path(os.environ["HARMED"]).exists(): time.sleep(0.05)
    sys.exit(1)
while not pathlib.Path(os.environ.get("GO_ON", "/")).exists(): time.sleep(0.05)
print("trained")
"""


def start(run: Path, env: dict[str, str], **more: str) -> subprocess.Popen[bytes]:
    """Start the job script under bash; its log is outside of the run, which is harmed."""
    with (run.parent / "said.log").open("ab") as log:
        return subprocess.Popen(
            ["bash", run / "job.sbatch"], env={**env, **more}, stdout=log, stderr=log
        )


def said(run: Path) -> str:
    return (run.parent / "said.log").read_text()


def root_only(command: list[str]) -> None:
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root can mount a filesystem")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem with few inodes."""
    folder = tmp_path / "shared"
    folder.mkdir()
    root_only(["mount", "-t", "tmpfs", "-o", "size=16m,nr_inodes=200", "tmpfs", str(folder)])
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_filesystem_that_is_read_only_for_a_while(place, plain_env):
    run = made(place, TWICE, max_retries=1).path
    harmed = place / "harmed"
    job = start(run, plain_env, HARMED=str(harmed))
    until(lambda: (run / "harm.me").exists(), 30, lambda: report(run))
    root_only(["mount", "--bind", str(run), str(run)])
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(run)], check=True)
        harmed.touch()
        until(lambda: "Read-only file system" in said(run), 30, lambda: said(run))
        assert job.poll() is None and attempts(run) == []
    finally:
        subprocess.run(["umount", str(run)], check=True)
    assert job.wait(timeout=60) == 0, said(run)
    assert [line["cause"] for line in attempts(run)] == ["killed", "finished"]
    assert state_of(Run(run)).word == "COMPLETED"


def test_no_inodes_left_is_told_as_such(place, small_disk, plain_env, tmp_path):
    script = (
        "import itertools, os, pathlib\n"
        "folder = pathlib.Path(os.environ['RUN_DIR']) / 'many'\n"
        "folder.mkdir()\n"
        "for number in itertools.count(): (folder / str(number)).touch()\n"
    )
    # The kit's code has its files elsewhere.
    (tmp_path / "elsewhere").mkdir()
    (small_disk / "code").symlink_to(tmp_path / "elsewhere")
    run = made(place, script, max_retries=3).path
    with open(os.devnull, "w") as nothing:
        argv = ["bash", run / "job.sbatch"]
        done = subprocess.run(argv, env=plain_env, stdout=nothing, stderr=nothing, timeout=60)
    assert done.returncode == 1
    state = state_of(Run(run))
    assert (state.word, Run(run).status["cause"]) == ("FAILED", "no_space")
    assert "no inodes are left" in state.detail and "remove files" in state.detail
    (line,) = attempts(run)
    assert (line["attempt"], line["cause"]) == (0, "no_space")
    # Room is made, and the same run goes on.
    for path in (run / "many").iterdir():
        path.unlink()
    assert history.next_attempt(run, Run(run).status) == 1


def with_python(run: Path, root: Path, text: str) -> Path:
    """Let the job script use a program of our own as the virtual environment's python."""
    python = root / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    real = paths.venv_root() / "bin"
    (python.parent / "torchrun").symlink_to(real / "torchrun")
    python.write_text("#!/bin/bash\n" + text + f'exec "{real}/python" "$@"\n')
    python.chmod(0o755)
    script = run / "job.sbatch"
    venv = f"export VENV={root / 'venv'}"
    script.write_text(re.sub("(?m)^export VENV=.*", venv, script.read_text()))
    return python


# What it is doing when it is killed: the file, or the directory, that has just been written.
MOMENTS = {
    "an attempt begins": "logs/0/.child.json",
    "an attempt runs": "harm.me",
    "the end is recorded": "attempts.jsonl",
}


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
def test_a_killed_supervisor_is_started_again_and_goes_on(place, plain_env, moment):
    """With the same processes: no attempt is lost by it, nor is an exit status."""
    run = made(place, TWICE, max_retries=1).path
    harmed, go_on = place / "harmed", place / "go_on"
    job = start(run, plain_env, HARMED=str(harmed), GO_ON=str(go_on))
    if moment == "attempts.jsonl":
        harmed.touch()
    until((run / moment).exists, 30, lambda: report(run))
    if moment == "attempts.jsonl":
        until(lambda: (run / moment).read_text(), 30, lambda: report(run))
    before = json.loads((run / "logs" / "0" / ".child.json").read_text())
    os.kill(supervisor(job.pid), signal.SIGKILL)
    harmed.touch()
    go_on.touch()
    assert job.wait(timeout=60) == 0, said(run)
    assert "it is restarted" in said(run)
    assert [(line["cause"], line["exit_code"]) for line in attempts(run)] == [
        ("killed", 1),
        ("finished", 0),
    ]
    assert json.loads((run / "logs" / "0" / ".child.json").read_text()) == before
    assert state_of(Run(run)).word == "COMPLETED"


def supervisor(script: int) -> int:
    """The supervisor of a job script."""
    children = psutil.Process(script).children()
    (pid,) = (each.pid for each in children if "slurm.supervise" in each.cmdline())
    return pid


def test_a_supervisor_that_is_killed_after_the_attempt_has_ended_knows_how(place, plain_env):
    """The exit status is kept by what has started the command."""
    run = made(place, TWICE, max_retries=1).path
    harmed = place / "harmed"
    job = start(run, plain_env, HARMED=str(harmed))
    until(lambda: (run / "harm.me").exists(), 30, lambda: report(run))
    pid = supervisor(job.pid)
    os.kill(pid, signal.SIGSTOP)
    harmed.touch()
    until(lambda: (run / "logs" / "0" / ".exit_status").exists(), 30, lambda: report(run))
    os.kill(pid, signal.SIGKILL)
    assert job.wait(timeout=60) == 0, said(run)
    assert [line["exit_code"] for line in attempts(run)] == [1, 0]


def test_a_supervisor_that_never_starts_is_shown_by_the_run(place, plain_env):
    run = made(place, max_retries=1).path
    python = with_python(run, place, "")
    python.rename(python.with_name("moved"))
    assert start(run, plain_env, FILES_WAIT_S="1").wait(timeout=60) == 1
    state = state_of(Run(run))
    assert state.word == "FAILED" and state.source == "status.json", said(run)
    assert "cannot see the virtual environment" in state.detail
    assert f"continue with: cookbook resume {run.name}" in state.detail
    # What bash has written continues as anything else does.
    python.with_name("moved").rename(python)
    assert start(run, plain_env).wait(timeout=60) == 0, said(run)
    assert [line["cause"] for line in attempts(run)] == ["finished"]


def test_a_supervisor_with_a_fault_of_its_own_gives_up(place, plain_env):
    run = made(place, max_retries=1).path
    with_python(run, place, 'case " $* " in *slurm.supervise*) exit 70 ;; esac\n')
    assert start(run, plain_env, RECORD_WAIT_S="2").wait(timeout=60) == 1
    assert "could not be started (exit status 70" in state_of(Run(run)).detail


def test_a_python_that_is_gone_is_waited_for(place, plain_env):
    """By the nodes: the supervisor has begun with it."""
    run = made(place, TWICE, max_retries=1).path
    python, harmed = with_python(run, place, ""), place / "harmed"
    job = start(run, plain_env, HARMED=str(harmed), FILES_WAIT_S="60")
    until(lambda: (run / "harm.me").exists(), 30, lambda: report(run))
    python.rename(python.with_name("moved"))
    harmed.touch()
    until(lambda: (run / "logs" / "1").exists(), 30, lambda: said(run))
    python.with_name("moved").rename(python)
    assert job.wait(timeout=60) == 0, said(run)
    assert [line["cause"] for line in attempts(run)] == ["killed", "finished"]


def test_a_finished_run_whose_python_is_gone_is_completed(place, plain_env):
    script = (
        "import json, os, pathlib\n"
        "run = pathlib.Path(os.environ['RUN_DIR'])\n"
        "told = {'state': 'finished', 'attempt': int(os.environ['COOKBOOK_ATTEMPT'])}\n"
        "(run / 'progress.json').write_text(json.dumps(told, indent=1))\n"
        f"pathlib.Path({str(place / 'venv')!r}, 'bin', 'python').unlink()\n"
    )
    run = made(place, script).path
    with_python(run, place, "")
    assert start(run, plain_env, RECORD_WAIT_S="1").wait(timeout=60) == 0, said(run)
    assert state_of(Run(run)).word == "COMPLETED"
    assert [line["cause"] for line in attempts(run)] == ["finished"]


WRONG = ["x", [1], {"a": 1}, None, 1.5, True]


@pytest.mark.parametrize("value", WRONG, ids=map(repr, WRONG))
def test_a_programs_progress_with_a_value_of_a_wrong_type_ends_no_run(tmp_path, monkeypatch, value):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("JOB_PID", str(os.getpid()))
    (tmp_path / "logs").mkdir()
    progress = {"state": "running", "attempt": 0, "saved": 3, "checkpoint_step": 3}
    for key in progress:
        attempt = records.begin(tmp_path, ["n1"])
        text = json.dumps({**progress, "attempt": attempt, key: value})
        (tmp_path / "progress.json").write_text(text)
        assert records.end(tmp_path, attempt, 1, max_retries=99) == "run", key


def test_records_that_cannot_be_read_are_not_taken_for_missing(tmp_path, monkeypatch, capsys):
    """An attempt whose progress is hidden for a moment must not count as completed."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("JOB_PID", str(os.getpid()))
    monkeypatch.setenv("RECORD_WAIT_S", "1")
    (tmp_path / "logs").mkdir()
    record = Recorder(tmp_path)
    record(records.begin, ["n1"])
    # Reading a folder fails with an error that is not "no such file".
    (tmp_path / "progress.json").mkdir()
    with pytest.raises(NotRecorded, match="Is a directory"):
        record(records.end, 0, 0)
    assert attempts(tmp_path) == [] and "tried again" in capsys.readouterr().out
    (tmp_path / "progress.json").rmdir()
    (tmp_path / "progress.json").write_text('{"state": "stopped", "attempt": 0}')
    assert record(records.end, 0, 0) == "failed"


def test_an_end_is_recorded_once_with_the_time_at_which_it_came(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("JOB_PID", str(os.getpid()))
    (tmp_path / "logs").mkdir()
    records.begin(tmp_path, ["n1"])
    ended = time.time() + 5
    # An hour later it could be written.
    for _ in range(2):
        assert records.end(tmp_path, 0, 1, 3, ended=ended) == "run"
    (line,) = attempts(tmp_path)
    assert line["ended"] == ended and line["cause"] == "killed"
