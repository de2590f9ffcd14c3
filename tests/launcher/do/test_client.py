"""What cookbook cancel, resume and status do to a run's jobs, on a real Slurm and without training.

The job scripts write the records that a real one writes, and wait.
"""

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from launcher import site
from launcher.do.resume import Changes, resume
from launcher.errors import CookbookError
from launcher.run.directory import Run
from launcher.slurm.job import token
from tests.conftest import SlurmCluster
from tests.launcher.kit import Kit, until

# As slurm/records.py begins an attempt; then it waits.
BODY = """
printf '{"state": "RUNNING", "job_id": "%s", "attempt": 0, "updated": 1, "cluster": "%s"}' \\
  "$SLURM_JOB_ID" "$SLURM_CLUSTER_NAME" >$RUN/.status && mv $RUN/.status $RUN/status.json
exec sleep 600
"""


def run_of(user: Kit, body: str = BODY) -> Run:
    """A run whose job script is body; cookbook resume starts it."""
    name = f"20260102-030405-demo-{secrets.token_hex(2)}"
    run = Run(user.root / "runs" / name)
    (run.path / "logs").mkdir(parents=True)
    script = (
        "#!/bin/bash",
        f"#SBATCH --comment={token(name)}",
        f"#SBATCH --output={run.path}/logs/job.log",
        "#SBATCH --open-mode=append",
        f"RUN={run.path}",
        body,
    )
    (run.path / "job.sbatch").write_text("\n".join(script))
    return run


def resumed(user: Kit, run: Run) -> str:
    """Resume a run and return the id of the job that the command names."""
    done = user.cookbook("resume", run.name)
    assert done.returncode == 0, done.stderr
    (job_id,) = re.findall(r"as job (\d+)$", done.stdout.strip())
    return job_id


def jobs_of(slurm: SlurmCluster, run: Run) -> dict[str, str]:
    """The run's jobs that Slurm still has, and their states."""
    text = slurm.run(["squeue", "--noheader", "--states=all", "--format=%i|%T|%k"]).stdout
    rows = [line.split("|") for line in text.splitlines()]
    ended = ("CANCELLED", "FAILED", "COMPLETED")
    return {row[0]: row[1] for row in rows if row[2] == token(run.name) and row[1] not in ended}


def works(run: Run, job_id: str) -> bool:
    return run.status.get("job_id") == job_id and run.status.get("state") == "RUNNING"


def batch_script(run: Run, job_id: str) -> int:
    """The process of a job's script, which ends as its last command."""
    for process in psutil.process_iter(["environ", "cmdline"]):
        own = (process.info["environ"] or {}).get("SLURM_JOB_ID") == job_id
        argv = process.info["cmdline"] or []
        if own and (argv == ["sleep", "600"] or "slurm_script" in " ".join(argv)):
            return process.pid
    pytest.fail(f"job {job_id} of {run.name} has no script")


@pytest.fixture
def closed(slurm):
    """The partition starts no jobs."""
    yield lambda: slurm.run(["scontrol", "update", "partitionname=gpu", "state=down"])
    slurm.run(["scontrol", "update", "partitionname=gpu", "state=up"])


def test_a_cancel_ends_the_job_that_a_resume_made_after_a_killed_script(
    slurm, slurm_user: Kit, closed
) -> None:
    user, run = slurm_user, run_of(slurm_user)
    first = resumed(user, run)
    until(lambda: works(run, first), 30)
    os.kill(batch_script(run, first), signal.SIGKILL)
    until(lambda: first not in jobs_of(slurm, run), 30)
    told = user.status(run.path)
    assert told["state"] == "FAILED" and told["detail"].endswith(
        f"it ended without a final state (killed?); continue with: cookbook resume {run.name}"
    )
    closed()
    second = resumed(user, run)
    assert second != first and jobs_of(slurm, run) == {second: "PENDING"}
    again = user.cookbook("resume", run.name)
    assert again.returncode == 2 and f"is PENDING (job {second}" in again.stderr
    assert f"cancelled {run.name} (job {second}); " in user.cookbook("cancel", run.name).stdout
    assert jobs_of(slurm, run) == {}
    told = user.status(run.path)
    assert (told["state"], told["source"]) == ("CANCELLED", "status.json")
    assert told["detail"] == "by cookbook cancel, while it was pending"
    # A resumed job is not what an earlier one was.
    third = resumed(user, run)
    told = until(lambda: (found := user.status(run.path))["detail"] and found, 20)
    assert (told["state"], told["source"], told["job_id"]) == ("PENDING", "squeue", third)
    assert "cancel" not in told["detail"]
    user.cookbook("cancel", run.name)


def test_a_cancel_ends_jobs_that_were_submitted_by_hand_too(slurm, slurm_user: Kit, closed) -> None:
    user, run = slurm_user, run_of(slurm_user)
    closed()
    first = resumed(user, run)
    by_hand = slurm.run(["sbatch", "--parsable", str(run.path / "job.sbatch")]).stdout.strip()
    stranger = slurm.run(
        ["sbatch", "--parsable", "--comment=mine", "--output=/dev/null", "--wrap=true"]
    ).stdout.strip()
    cancelled = user.cookbook("cancel", run.name)
    assert f"(job {first} and job {by_hand})" in cancelled.stdout
    assert jobs_of(slurm, run) == {}
    shown = slurm.run(["squeue", "--noheader", f"--jobs={stranger}", "--format=%T"]).stdout
    assert shown.strip() == "PENDING"
    slurm.run(["scancel", stranger])


def test_a_job_that_ends_before_its_first_attempt_shows_its_scripts_word(
    slurm, slurm_user: Kit
) -> None:
    words = "fault: n1 cannot see the virtual environment /nowhere"
    run = run_of(slurm_user, f'echo "12:00:00 cookbook: $SLURM_JOB_ID {words}"\nexit 1')
    (run.path / "logs" / "job.log").write_text("cookbook: an older job's\n")
    job = resumed(slurm_user, run)
    until(lambda: job not in jobs_of(slurm, run), 30)
    told = slurm_user.status(run.path)
    assert told["state"] == "FAILED"
    assert f", before its first attempt (job.log says: {job} {words})" in told["detail"]


# Two clusters ---------------------------------------------------------------------------------


def test_another_clusters_run_is_left_alone_and_said_to_be_there(
    slurm, slurm_user: Kit, new_cluster
) -> None:
    user, run = slurm_user, run_of(slurm_user)
    job = resumed(user, run)
    until(lambda: works(run, job), 30)
    assert run.jobs[-1]["cluster"] == "tests" and run.jobs[-1]["controller"]
    with new_cluster("other", "--set", f"FirstJobId={int(job) - 3}") as other:
        there = Kit({**user.env, **other.env}, user.root)
        wrap = [
            "sbatch",
            "--parsable",
            "--comment=mine",
            "--output=/dev/null",
            "--wrap=exec sleep 600",
        ]
        until(lambda: int(other.run(wrap).stdout) >= int(job), 10)
        told = there.status(run.path)
        assert told["state"] == "RUNNING" and "belongs to cluster tests" in told["detail"]
        assert told["detail"].endswith(f"export SLURM_CONF={slurm.env['SLURM_CONF']}")
        for command, status in (("resume", 2), ("cancel", 1)):
            done = there.cookbook(command, run.name)
            assert done.returncode == status, done.stdout + done.stderr
            assert f"export SLURM_CONF={slurm.env['SLURM_CONF']}, and" in done.stderr
        # A record of an older release names no cluster.
        record = {key: value for key, value in run.jobs[-1].items() if key != "cluster"}
        run.write("submission.json", {**run.submission, "jobs": [record]})
        run.write("status.json", {"state": "RUNNING", "job_id": job, "attempt": 0})
        done = there.cookbook("cancel", run.name)
        assert f"{run.name} has no known job" in done.stdout
        shown = other.run(["squeue", "--noheader", f"--jobs={job}", "--format=%k"]).stdout
        assert shown.strip() == "mine", "the stranger's job was cancelled"
    assert jobs_of(slurm, run) == {job: "RUNNING"}
    assert f"(job {job})" in user.cookbook("cancel", run.name).stdout


# Commands that fail, race or die --------------------------------------------------------------


def with_program(user: Kit, folder: Path, name: str, *lines: str) -> Kit:
    """A user whose first program of a name in PATH is these lines; $REAL is the real one."""
    folder.mkdir(parents=True)
    real = shutil.which(name, path=user.env["PATH"])
    program = folder / name
    program.write_text("\n".join(["#!/bin/bash", f"REAL={real}", *lines]) + "\n")
    program.chmod(0o755)
    return Kit({**user.env, "PATH": f"{folder}:{user.env['PATH']}"}, user.root)


def start(user: Kit, *arguments: str) -> subprocess.Popen[str]:
    # As in a terminal: a shell has its background processes, such as these tests, ignore Ctrl-C.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from launcher.cli import main; main()"
    argv, pipe = [sys.executable, "-c", code, *arguments], subprocess.PIPE
    return subprocess.Popen(argv, env=user.env, stdout=pipe, stderr=pipe, text=True)


def test_a_cancel_that_fails_leaves_no_mark(slurm, slurm_user: Kit, tmp_path: Path) -> None:
    user, run = slurm_user, run_of(slurm_user)
    job = resumed(user, run)
    until(lambda: works(run, job), 30)
    words = "scancel: error: Kill job error on job id 1: Unable to contact slurm controller"
    lame = with_program(user, tmp_path / "bin", "scancel", f'echo "{words}" >&2', "exit 1")
    for _ in range(2):
        done = lame.cookbook("cancel", run.name)
        assert done.returncode == 1, done.stdout
        assert done.stderr.startswith(f"error: {run.name} may not be cancelled: Slurm says")
        assert not (run.path / "cancelled.json").exists()
    assert jobs_of(slurm, run) == {job: "RUNNING"}
    user.cookbook("cancel", run.name)
    mark = json.loads((run.path / "cancelled.json").read_text())
    assert mark["job_id"] == job


def test_two_resumes_at_once_make_one_job(slurm, slurm_user: Kit, closed) -> None:
    run = run_of(slurm_user)
    closed()
    racers = [start(slurm_user, "resume", run.name) for _ in range(3)]
    ends = [racer.communicate(timeout=60) for racer in racers]
    assert sorted(racer.returncode == 0 for racer in racers) == [False, False, True], ends
    assert len(jobs_of(slurm, run)) == 1
    assert list(jobs_of(slurm, run)) == [job["job_id"] for job in run.jobs]
    slurm_user.cookbook("cancel", run.name)


def test_a_command_that_is_killed_around_sbatch_leaves_one_job(
    slurm, slurm_user: Kit, tmp_path: Path, closed
) -> None:
    user, run = slurm_user, run_of(slurm_user)
    closed()
    # The client dies first, and sbatch goes on without it.
    slow = with_program(
        user, tmp_path / "slow", "sbatch", "kill -9 $PPID", "sleep 2", 'exec "$REAL" "$@"'
    )
    assert slow.cookbook("resume", run.name).returncode == -signal.SIGKILL
    early = user.cookbook("resume", run.name)
    assert early.returncode == 1 and "another cookbook command (process " in early.stderr
    (job,) = until(lambda: jobs_of(slurm, run), 20)
    until(lambda: "another cookbook" not in user.cookbook("resume", run.name).stderr, 20)
    told = user.cookbook("resume", run.name)
    assert told.returncode == 2 and f"is PENDING (job {job}" in told.stderr
    # It dies when the job is there and its id is not written down yet.
    user.cookbook("cancel", run.name)
    late = with_program(user, tmp_path / "late", "sbatch", '"$REAL" "$@"; kill -9 $PPID')
    assert late.cookbook("resume", run.name).returncode == -signal.SIGKILL
    (second,) = jobs_of(slurm, run)
    told = user.status(run.path)
    assert (told["state"], told["job_id"]) == ("PENDING", second)
    assert user.cookbook("resume", run.name).returncode == 2
    assert f"(job {second})" in user.cookbook("cancel", run.name).stdout
    assert jobs_of(slurm, run) == {}


def test_ctrl_c_during_sbatch_says_which_job_is_queued(
    slurm, slurm_user: Kit, tmp_path: Path, closed
) -> None:
    run = run_of(slurm_user)
    closed()
    slow = with_program(
        slurm_user, tmp_path / "bin", "sbatch", f"touch {tmp_path}/asked", "sleep 2", '"$REAL" "$@"'
    )
    resuming = start(slow, "resume", run.name)
    until((tmp_path / "asked").exists, 20)
    resuming.send_signal(signal.SIGINT)
    _, words = resuming.communicate(timeout=30)
    (job,) = jobs_of(slurm, run)
    assert resuming.returncode == 130 and f"{run.name} is queued as job {job}: " in words, words
    assert f"(job {job})" in slurm_user.cookbook("cancel", run.name).stdout


# A resume with changes ------------------------------------------------------------------------


def test_a_resume_takes_other_nodes_and_keys_and_refuses_what_makes_another_run(
    slurm, kit: Kit, closed, monkeypatch
) -> None:
    closed()
    submitted = ("--recipe", "demo", "--nodes", "2", "--gpus-per-node", "1")
    job, path = kit.submit(*submitted, "--name", "changed", "--no-check")
    kit.cookbook("cancel", job)
    marker = path / "checkpoints" / "step_5" / "COMPLETE"
    marker.parent.mkdir(parents=True)
    marker.touch()
    names = ("recipe.yaml", "train.yaml", "job.sbatch", "submission.json")
    before = {name: (path / name).read_text() for name in names}
    for name in ("SLURM_CONF", "COOKBOOK_ROOT", "COOKBOOK_VENV"):
        monkeypatch.setenv(name, kit.env[name])
    for overrides, options, told in (
        (["seed=8"], {}, "seed may not change at resume, from 0 to 8: leave it out, or make"),
        (["batch_size=3"], {}, "but the run's checkpoints were made with"),
        (["optimizer.lrr=1"], {}, "did you mean optimizer.lr?"),
        (["gradient_accumulation_steps=1"], {"nodes": 3}, "a step would use"),
        ([], {"partition": "nowhere"}, "there is no partition 'nowhere'"),
        (["tensor_parallel_dim=3"], {}, "does not divide 2 ranks"),
    ):
        with pytest.raises(CookbookError, match=re.escape(told)):
            resume(Run(path), changes=Changes(site.load(), tuple(overrides), options))
        assert {name: (path / name).read_text() for name in names} == before
    done = kit.cookbook("resume", path.name, "--nodes", "1", "--time", "30", "optimizer.lr=1e-3")
    assert done.returncode == 0, done.stderr
    assert "note: gradient_accumulation_steps=2, so that a step uses" in done.stderr
    script, train = ((path / name).read_text() for name in ("job.sbatch", "train.yaml"))
    assert "#SBATCH --nodes=1\n" in script and "#SBATCH --time=30\n" in script
    assert "#SBATCH --job-name=changed\n" in script and f"RUN_DIR={path}\n" in script
    assert "gradient_accumulation_steps: 2\n" in train and "lr: 0.001\n" in train
    made = Run(path).jobs[-1]
    assert made["changes"][:2] == ["--nodes=1", "--time=30"]
    assert jobs_of(slurm, Run(path)) == {made["job_id"]: "PENDING"}
    kit.cookbook("cancel", path.name)
