"""What is said of runs that squeue, sacct and this host know nothing of; broken records."""

import errno
import os
import shutil
import socket
import threading
from pathlib import Path

import pytest

from launcher.do.cancel import cancel
from launcher.do.resume import resume
from launcher.errors import RunFault, UsageFault
from launcher.look import watch as watching
from launcher.look.status import row, table
from launcher.look.summary import summary
from launcher.run.directory import Run
from launcher.run.find import find
from launcher.run.states import state_of, states
from launcher.slurm.executors import title
from tests.failing_storage import FailingStorage
from tests.launcher.kit import Kit

NAME = "20260102-030405-demo-0a1b"


def run_of(root: Path, status: dict | None = None, **job) -> Run:
    """A run directory with one submitted job and what it wrote."""
    run = Run(root / "runs" / NAME)
    (run.path / "logs").mkdir(parents=True)
    jobs = [{"submitted": 100.0, **job}] if job else []
    run.write("submission.json", {"run": NAME, "recipe": "demo", "jobs": jobs})
    if status is not None:
        run.write("status.json", {"updated": 200.0, "attempt": 0, **status})
    return run


def test_a_process_of_another_host_is_neither_resumed_nor_cancelled_here(tmp_path):
    here = {"job_id": "local-7", "host": "elsewhere", "process_start": "1"}
    run = run_of(tmp_path, {"state": "RUNNING", "job_id": "local-7"}, **here)
    state = state_of(run)
    assert (state.word, state.ended) == ("RUNNING", False)
    assert state.detail.startswith("it was started on elsewhere, without Slurm")
    with pytest.raises(UsageFault, match=r"is RUNNING \(process 7\): it was started on elsewhere"):
        resume(run)
    with pytest.raises(RunFault, match="is a process of elsewhere: repeat the command there"):
        cancel(run)
    assert not (run.path / "cancelled.json").exists()
    assert title("local-7") == "process 7" and title("7") == "job 7"


def test_a_process_whose_id_was_given_to_another_is_not_the_runs(tmp_path):
    here = {"job_id": f"local-{os.getpid()}", "host": socket.gethostname(), "process_start": "1"}
    state = state_of(run_of(tmp_path, None, **here))
    assert (state.word, state.ended) == ("FAILED", True)
    assert state.detail.startswith("its process is gone, before its first attempt; ")


def test_watch_waits_for_the_jobs_own_last_word(tmp_path, monkeypatch):
    """The process is gone, and what it wrote last arrives later, as on a network filesystem."""
    monkeypatch.setattr(watching, "_DOUBT_S", 20.0)
    gone = {"job_id": f"local-{os.getpid()}", "host": socket.gethostname(), "process_start": "1"}
    running = {"job_id": gone["job_id"], "host": gone["host"], "process_start": "1"}
    run = run_of(tmp_path, running | {"state": "RUNNING"}, **gone)
    last = {**run.status, "state": "COMPLETED"}
    timer = threading.Timer(1.0, run.write, ["status.json", last])
    timer.start()
    (state,) = watching.watch_all([run], lambda line: None, poll_s=0.1)
    timer.join()
    assert (state.word, state.source) == ("COMPLETED", "status.json")


def test_while_slurm_cannot_be_asked_nothing_is_taken_to_have_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    run = run_of(tmp_path, None, job_id="17")
    state = state_of(run)
    assert (state.word, state.ended) == ("UNKNOWN", False)
    assert state.detail.startswith("there is no squeue on this machine")
    with pytest.raises(UsageFault, match=r"is UNKNOWN \(job 17, there is no squeue"):
        resume(run)


def test_a_run_without_any_job_says_so(slurm, tmp_path, kit: Kit):
    user = Kit({**kit.env, "COOKBOOK_ROOT": str(tmp_path)}, tmp_path)
    run = run_of(tmp_path)
    told = user.status(run.path)
    assert (told["state"], told["job_id"]) == ("UNKNOWN", None)
    assert told["detail"].startswith("its job is gone from the queue, it has written no state; ")
    done = user.cookbook("cancel", NAME)
    assert done.stdout.startswith(f"{NAME} has no known job") and "None" not in done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("own", "message", "told"),
    [
        ("INTERRUPTED", "Slurm ended the job: TIMEOUT", "Slurm ended the job: TIMEOUT; continue"),
        ("RUNNING", "", "its job is gone from the queue, its last state was RUNNING; continue"),
    ],
)
def test_watch_ends_when_the_queue_has_forgotten_the_job(tmp_path, kit: Kit, own, message, told):
    user = Kit({**kit.env, "COOKBOOK_ROOT": str(tmp_path)}, tmp_path)
    status = {"state": own, "job_id": "1", "message": message}
    run_of(tmp_path, status, job_id="1")
    watched = user.cookbook("watch", NAME, timeout=60)
    word = "INTERRUPTED" if own == "INTERRUPTED" else "UNKNOWN"
    assert watched.returncode == 1 and watched.stdout.startswith(f"{NAME} {word}: {told} with: ")
    assert user.cookbook("logs", "-f", NAME, timeout=60).returncode == 0


def test_a_job_that_wrote_nothing_yet_has_not_the_state_of_an_earlier_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    run = run_of(tmp_path, {"state": "CANCELLED", "job_id": "1"}, job_id="1")
    assert state_of(run).word == "CANCELLED"
    jobs = [{"job_id": "1", "submitted": 100.0}, {"job_id": "2", "submitted": 300.0}]
    run.write("submission.json", {"jobs": jobs})
    assert run.job_id == "2"
    assert (state_of(run).word, state_of(run).ended) == ("UNKNOWN", False)
    # Whatever the clock of job 1's node says.
    run.write("status.json", {"state": "FAILED", "job_id": "1", "updated": 9e9})
    assert (state_of(run).word, run.job_id) == ("UNKNOWN", "2")
    # Submitted by hand since, so no command wrote its id down.
    run.write("status.json", {"state": "FAILED", "job_id": "3", "updated": 4.0})
    assert (state_of(run).word, run.job_id) == ("FAILED", "3")


def test_resume_of_a_run_that_finished_nevertheless_starts_no_job(tmp_path):
    """Its job was cancelled in the export, which went on to its end."""
    here = {"job_id": "local-7", "host": socket.gethostname(), "process_start": "1"}
    run = run_of(tmp_path, {"state": "CANCELLED", "job_id": "local-7"}, **here)
    run.write("progress.json", {"state": "finished", "attempt": 0})
    said: list[str] = []
    assert not resume(run, say=said.append)
    assert said == [f"{NAME} had finished: it is COMPLETED, and no job was started"]
    assert (state_of(run).word, len(run.jobs)) == ("COMPLETED", 1)


@pytest.mark.parametrize("text", [b"{", b"[1]", b"\xff{}"])
@pytest.mark.parametrize("name", ["status.json", "submission.json", "progress.json"])
def test_a_broken_record_is_named_and_hides_no_other_run(tmp_path, name, text):
    run, whole = run_of(tmp_path), Run(tmp_path / "runs" / "20260102-030405-whole-0a1b")
    shutil.copytree(run.path, whole.path)
    whole.write("status.json", {"state": "COMPLETED", "job_id": "7"})
    (run.path / name).write_bytes(text)
    known = states([run, whole])
    assert known[whole.name].word == "COMPLETED"
    shown = list(table([row(each, known[each.name]) for each in (run, whole)]))
    path = run.path / name
    assert f"{path} is broken (not a JSON object): move it away with: mv {path} " in shown[1]
    assert "COMPLETED" in shown[2] and list(summary(run, known[run.name]))
    with pytest.raises(RunFault, match=f"{name}.broken.*; then: cookbook resume"):
        resume(run)
    assert path.read_bytes() == text, "what is broken is not overwritten"
    assert find(tmp_path / "runs", "whole") == whole


@pytest.mark.parametrize("command", ["status", "status last", "logs", "watch"])
def test_bytes_that_are_no_text_are_shown_as_such(tmp_path, user: Kit, command):
    user = Kit({**user.env, "COOKBOOK_ROOT": str(tmp_path), "PYTHONIOENCODING": "ascii"}, tmp_path)
    run = run_of(tmp_path, {"state": "COMPLETED", "job_id": "1"}, job_id="1")
    junk = b'{"step": 1, "loss": 2.5}\n{"step": "\xff", "loss": "\xfe"}\n7\n\xff\n'
    for name in ("metrics.jsonl", "attempts.jsonl", "logs/job.log"):
        (run.path / name).write_bytes(junk)
    done = user.cookbook(*command.split())
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


DEEP = "[" * 100_000
ODD = [DEEP, "null", "[]", '{"step": [], "loss": {}}', '{"step": "x", "loss": "y", "time": "z"}']
ODD += ['{"step": 3, "loss": null, "time": 1e400}', '{"step": true}', f'{{"step": {"9" * 400}}}']


@pytest.mark.parametrize(
    "command",
    [
        "status",
        f"status {NAME}",
        "results",
        f"diff whole {NAME}",
        f"report whole {NAME} --output OUT.html",
        f"watch --plain {NAME}",
    ],
)
def test_another_runs_damage_is_never_mine(tmp_path, user: Kit, command):
    user = Kit({**user.env, "COOKBOOK_ROOT": str(tmp_path)}, tmp_path)
    run = run_of(tmp_path, {"state": "COMPLETED", "job_id": "1"}, job_id="1")
    (run.path / "recipe.yaml").write_text("max_steps: 2\n")
    shutil.copytree(run.path, run.path.with_name("20260102-030405-whole-0a1b"))
    (run.path / "logs" / "0").mkdir()
    lines = ("metrics", "attempts", "samples", "rollouts")
    for name in (f"{name}.jsonl" for name in lines):
        (run.path / name).write_text("".join(f"{line}\n" for line in ODD))
    whole = ("provenance.json", "recipe.yaml", "rollout.json", "engine.json")
    whole += ("evals/x.json", "export/config.json", "logs/0/error_rank_0.json", "progress.json")
    for name in whole:
        (run.path / name).parent.mkdir(exist_ok=True)
        (run.path / name).write_text(DEEP)
    done = user.cookbook(*command.replace("OUT", f"{tmp_path}/report").split())
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EACCES, "ask its owner for access; who that is, says: namei -l"),
        (errno.ELOOP, "look at it with: namei -l"),
        (errno.ESTALE, "check its filesystem, and try again"),
    ],
)
def test_what_the_system_refuses_is_one_line(tmp_path, user: Kit, number, remedy):
    storage = FailingStorage(tmp_path)
    variables = {**storage.env, "STORAGE_WAIT_S": "0", "COOKBOOK_ROOT": str(tmp_path)}
    user = Kit({**user.env, **variables}, tmp_path)
    runs = run_of(tmp_path, {"state": "COMPLETED", "job_id": "1"}, job_id="1").path.parent
    storage.fail(str(runs), number)
    done = user.cookbook("status")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    told = (f"error: {runs}", os.strerror(number), remedy)
    assert all(part in done.stderr for part in told), done.stderr
