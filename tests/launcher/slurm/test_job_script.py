"""The job script under real bash and real Slurm: a site's own lines, a second submission, umask."""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import paths
from launcher.do.resume import Changes, resume, script_of_today
from launcher.do.submit import plan, record
from launcher.errors import RecipeFault, RunFault
from launcher.recipe import load as recipes
from launcher.run import code, directory
from launcher.run.directory import Run
from launcher.run.states import State, state_of
from launcher.site import Site, load
from launcher.slurm.executors import choose
from runspec.variables import owned_variables
from tests.launcher.kit import BY_SHELL, Kit, processes_of, project, report, until

PASS = "print('trained')\n"
SUPERVISE = [sys.executable, "-P", "-m", "slurm.supervise", "--", "srun", "true"]


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("COOKBOOK_ROOT", str(tmp_path / "shared"))
    return tmp_path


def made(
    folder: Path,
    script: str = PASS,
    shared: bool = False,
    max_retries: int = 0,
    shell: bool = True,
    **site,
) -> Run:
    """A run of a script of one line on a site, without torchrun by default; it is not started."""
    resources = {"nodes": 1, "gpus_per_node": 1, "time": "10"}
    keys = {"resources": resources, "max_retries": max_retries, **(BY_SHELL if shell else {})}
    path = project(folder, script, **keys)
    loaded = recipes.load(str(path), ["share=group"] if shared else [])
    planned = plan(loaded, Site(name="site", **site), choose(True))
    umask = int(loaded.umask, 8)
    kit = code.present(planned.cluster.root)
    return directory.create(planned.path, planned.contents, kit, {".": path.parent}, umask)


def begun(run: Run, env: dict[str, str], *argv: str) -> subprocess.Popen[bytes]:
    """Start the job script under bash, as submit --local does, or another command as its job."""
    with (run.logs / "job.log").open("ab") as log:
        whole = argv or ["bash", str(run.path / "job.sbatch")]
        return subprocess.Popen(whole, env=env, stdout=log, stderr=log)


def by_bash(run: Run, plain_env: dict[str, str]) -> int:
    """Run the job script to its end; return its exit status."""
    return begun(run, plain_env).wait(timeout=120)


def log(run: Run) -> str:
    return (run.logs / "job.log").read_text()


# The site's own lines -----------------------------------------------------------------------

FAILING = {
    "false": ("false", 1),
    "a module that is not there": ("module() { return 3; }; module load cuda/99", 3),
    "set -u of its own": ("set -u; echo $UNSET_VAR", 1),
    "the end of the script": ("exit 0", 1),
    "quotes": (r'[ "$HOME" = "a\"b" ]', 1),
}


@pytest.mark.parametrize(("line", "status"), FAILING.values(), ids=FAILING)
def test_a_setup_line_that_fails_ends_the_run_and_is_named(root, plain_env, line, status):
    run = made(root, job_setup=("export BEFORE=1", line, "echo after"))
    assert by_bash(run, plain_env) == 1
    assert "trained" not in log(run) and "\nafter\n" not in log(run)
    state = state_of(run)
    assert (state.word, state.source, state.ended) == ("FAILED", "status.json", True)
    told = f"the job_setup line '{line}' failed with exit status {status} (see "
    assert f"configs/clusters/site.yaml: {told}" in state.detail
    assert f"fix it there, then: cookbook resume {run.name}" in state.detail
    assert (run.status["cause"], run.attempts) == ("setup", [])


def test_setup_lines_may_use_unset_variables_and_set_what_the_ranks_see(root, plain_env):
    script = "import os\nassert os.environ['CUDA_HOME'] == '/opt/cuda with a blank'\n"
    lines = (
        'module() { export CUDA_HOME="/opt/cuda$UNSET_VAR with a blank"; }',
        "module load cuda",
        "[ -d /nowhere ] && export CUDA_HOME=/nowhere",
        "cd /nowhere 2>/dev/null || true",
        "set -e",
    )
    run = made(root, script, job_setup=lines)
    assert by_bash(run, plain_env) == 0, report(run.path)
    assert state_of(run).word == "COMPLETED"


@pytest.fixture
def site_file(monkeypatch, tmp_path) -> Path:
    """A site's file of this test's own."""
    monkeypatch.setattr(paths, "CLUSTERS", tmp_path / "clusters")
    paths.CLUSTERS.mkdir()
    return paths.CLUSTERS / "here.yaml"


def test_a_fixed_site_file_takes_effect_at_resume(root, plain_env, site_file):
    site_file.write_text("# Ours.\njob_setup:\n  - export BEFORE=1\n  - module-of-ours load\n")
    path = project(root, PASS, **BY_SHELL, resources={"nodes": 1, "time": "10"})
    planned = plan(recipes.load(str(path)), load("here"), choose(True))
    run = record(planned, code.present(planned.cluster.root))
    assert by_bash(run, plain_env) == 1
    place = "configs/clusters/here.yaml: the job_setup line 'module-of-ours load'"
    assert f"{place} failed with exit status 127" in state_of(run).detail
    said: list[str] = []
    site_file.write_text("job_setup:\n  - export AFTER=1\n")
    resume(run, choose(True), say=said.append)
    until(lambda: state_of(run).word == "COMPLETED", 60, lambda: report(run.path))
    again = "job.sbatch rendered again from configs/clusters/here.yaml"
    assert said == [f"{again.replace(' ', ': ', 1)}, which has changed since"]
    assert run.jobs[-1]["changes"] == [again]


def test_a_script_that_was_edited_by_hand_stays_as_it_is(root, site_file):
    site_file.write_text("job_setup: [export BEFORE=1]\n")
    path = project(root, PASS, resources={"time": "10"})
    planned = plan(recipes.load(str(path)), load("here"), choose(True))
    run = record(planned, code.present(planned.cluster.root))
    script, said = run.path / "job.sbatch", []
    edited = script.read_text().replace("BEFORE=1", "BEFORE=2")
    site_file.write_text("job_setup: [export BEFORE=3]\n")
    shell = str(root / "other-environment")
    with script_of_today(run, choose(True), said.append):
        assert "export BEFORE=3" in script.read_text()
    original = script.read_text()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "venv_root", lambda: Path(shell))
        site_file.write_text("job_setup: [export BEFORE=4]\n")
        with script_of_today(run, choose(True), said.append) as changes:
            assert changes == [] and script.read_text() == original
    script.write_text(edited)
    with script_of_today(run, choose(True), said.append) as changes:
        assert changes == [] and script.read_text() == edited
    assert said[0].startswith("job.sbatch: rendered again")
    assert said[1].startswith(
        "note: job.sbatch stays as it is, because this shell has another VENV"
    )
    assert said[2] == "note: job.sbatch was edited by hand and stays as it is"


@pytest.mark.parametrize("line", ["if true; then", "echo 'a", "echo )"])
def test_a_setup_line_that_bash_cannot_read_is_refused_before_the_queue(root, line):
    with pytest.raises(RecipeFault, match=r"bash cannot read the job_setup line .* in configs/"):
        made(root, job_setup=("true", line))


# Submitted again ----------------------------------------------------------------------------


def test_a_script_started_twice_leaves_the_run_to_the_first(root, plain_env):
    run = made(root, "import time; time.sleep(600)\n")
    first = begun(run, plain_env)
    try:
        until(lambda: run.status, 20, lambda: report(run.path))
        assert state_of(run) == State(
            "RUNNING", "this host", "on this host, without Slurm", job_id=f"local-{first.pid}"
        )
        assert by_bash(run, plain_env) == 1
        assert f"job local-{first.pid} still works on this run" in log(run)
        assert run.status["attempt"] == 0 and run.attempts == []
    finally:
        first.send_signal(signal.SIGTERM)
        assert first.wait(timeout=60) == 143
    state = state_of(run)
    assert (state.word, state.detail) == ("CANCELLED", "its job was cancelled")


# Where the job is when a TERM comes: at each of these files its log folder has just been written.
# A supervisor that has read no line yet cannot tell a TERM from a kill: the script restarts it.
@pytest.mark.parametrize(
    ("whom", "moment"),
    [
        ("the script", ""),
        ("the script", "logs/0/.child.json"),
        ("the supervisor", "status.json"),
        ("the supervisor", "logs/0/.child.json"),
        ("both", "status.json"),
    ],
)
def test_a_job_that_ends_as_its_attempt_begins_is_recorded(root, plain_env, whom, moment):
    run = made(root, "import time; time.sleep(600)\n")
    job = begun(run, plain_env)
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
    until(lambda: (run.path / moment).exists() and children.read_text(), 30)
    supervisor = int(children.read_text().split()[-1])
    for pid in {"the script": [job.pid], "the supervisor": [supervisor]}.get(
        whom, [job.pid, supervisor]
    ):
        os.kill(pid, signal.SIGTERM)
    assert job.wait(timeout=60) == 143, report(run.path)
    if run.attempts:
        assert run.status["state"] == "CANCELLED", report(run.path)
        (attempt,) = run.attempts
        assert (attempt["attempt"], attempt["cause"]) == (0, "cancelled")
    else:
        assert run.status.get("state") != "RUNNING", report(run.path)
    until(lambda: not processes_of(run.path), 30, lambda: f"left over: {processes_of(run.path)}")


ENDED = "slurmstepd-n1: error: *** JOB 11 ON n1 CANCELLED AT 2026-11-24T01:56:42{} ***\n"


def between(
    folder: Path, plain_env: dict[str, str], status: dict, **programs: str
) -> tuple[Run, dict[str, str]]:
    """A run with a record, and the environment of job 11's supervisor, started again.

    programs: Slurm's, each a line of shell.
    """
    run = Run(folder / "runs" / "20260102-030405-demo-0a1b")
    (run.logs / "0").mkdir(parents=True)
    run.write("status.json", {"restart_count": 0, **status})
    for name, line in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    env = {**plain_env, "PATH": f"{folder}:{plain_env['PATH']}", "RUN_DIR": str(run.path)}
    env |= dict.fromkeys(("COOKBOOK", "PYTHONPATH"), str(paths.REPO_ROOT))
    env |= {"VENV": str(paths.venv_root()), "COOKBOOK_AGAIN": "yes", "SLURM_JOB_ID": "11"}
    return run, env | {"SLURM_RESTART_COUNT": "0", "NODES": "1", "MAX_RETRIES": "3"}


RETRYING = {"job_id": "11", "attempt": 0, "state": "RETRYING", "cause": "killed"}
RETRYING |= {"job_log_bytes": 0}


@pytest.mark.parametrize(
    ("why", "state", "cause"),
    [
        ("", "CANCELLED", "cancelled"),
        (" DUE TO TIME LIMIT", "INTERRUPTED", "time_limit"),
        (" DUE TO JOB REQUEUE", "INTERRUPTED", "requeued"),
    ],
)
def test_a_job_that_ends_between_attempts_is_recorded(tmp_path, plain_env, why, state, cause):
    """While it waits for Slurm's controller, as here, or for a step to be cleared up."""
    run, env = between(tmp_path, plain_env, RETRYING, scontrol="exit 1")
    (run.path / "attempts.jsonl").write_text(json.dumps(RETRYING) + "\n")
    job = begun(run, env, *SUPERVISE)
    until(lambda: "waiting for Slurm's controller" in log(run), 30, lambda: report(run.path))
    with (run.logs / "job.log").open("a") as text:
        text.write(ENDED.format(why))
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=60) == 76, report(run.path)
    assert (run.status["state"], run.status["cause"]) == (state, cause), report(run.path)
    assert run.attempts == [RETRYING]


def test_a_warning_between_two_attempts_puts_the_job_back_into_the_queue(tmp_path, plain_env):
    """Slurm would end the next attempt at once."""
    run, env = between(tmp_path, plain_env, RETRYING, scontrol=f'echo "$@" >>{tmp_path}/asked')
    assert begun(run, env | {"COOKBOOK_WARNED": "yes"}, *SUPERVISE).wait(timeout=60) == 0, log(run)
    assert (run.status["state"], run.status["cause"]) == ("REQUEUED", "time_limit")
    assert "requeue 11" in (tmp_path / "asked").read_text() and not (run.logs / "1").exists()


def test_the_warning_before_the_time_limit_asks_the_ranks_to_stop(root, plain_env):
    """By the file that the trainer, and a script of the user's own, looks for."""
    script = (
        "import os, pathlib, time\n"
        "stop = pathlib.Path(os.environ['COOKBOOK_STOP_FILE'])\n"
        "deadline = time.monotonic() + 60\n"
        "print('waiting', flush=True)\n"
        "while not stop.exists() and time.monotonic() < deadline: time.sleep(0.1)\n"
        "assert stop.exists()\n"
    )
    run = made(root, script)
    job = begun(run, plain_env)
    rank = run.logs / "0" / "rank_0.log"
    until(lambda: rank.exists() and rank.read_text(), 30, lambda: report(run.path))
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=120) == 0, report(run.path)
    assert "the time limit is near" in log(run)


# Who may read -------------------------------------------------------------------------------


def modes(run: Run) -> dict[str, int]:
    found = {
        "": run.path,
        **{str(path.relative_to(run.path)): path for path in run.path.rglob("*")},
    }
    return {
        name: stat.S_IMODE(path.stat().st_mode)
        for name, path in found.items()
        if not path.is_symlink() and not name.startswith("code/")
    }


@pytest.mark.parametrize(("shared", "forbidden"), [(False, 0o077), (True, 0o027)])
def test_a_run_is_private_or_open_to_the_group(root, plain_env, shared, forbidden):
    before = os.umask(0o022)
    try:
        made(root / "earlier")
        run = made(root, shared=shared)
        assert by_bash(run, plain_env) == 0
        run.write("cancelled.json", {})
    finally:
        os.umask(before)
    found = modes(run)
    assert {"logs/0/rank_0.log", "status.json", "cancelled.json", "logs/job.log"} <= set(found)
    assert not [name for name, mode in found.items() if mode & forbidden], found
    if shared:
        closed = [name for name, mode in found.items() if not mode & 0o040]
        assert not closed, closed
        assert stat.S_IMODE(run.path.parent.stat().st_mode) & 0o050 == 0o050


# Variables that are not the recipe's ---------------------------------------------------------


def test_all_owned_names_and_empty_values_are_refused_at_once(root):
    path = project(root, PASS, env={"LOGS": "x", "EMPTY": None})
    own = ["NODES", "RUN_DIR", "SLURM_NNODES", "SBATCH_PARTITION", "MASTER_PORT", "WORLD_SIZE"]
    own += ["COOKBOOK", "RANK", "UID", "SUPERVISOR"]
    with pytest.raises(RecipeFault) as refused:
        recipes.load(str(path), [*(f"+env.{name}=1" for name in own), "+env.UNSET=null"])
    told = refused.value.faults
    assert len(told) == len(own) + 3
    for name in own:
        words = f"env sets {name}, which the job script, Slurm or torchrun sets"
        assert any(line.startswith(words) and f"'+env.{name}=1'" in line for line in told)
    for name in ("EMPTY", "UNSET"):
        assert any(line.startswith(f'env.{name} has no value: write {name}: ""') for line in told)
    with pytest.raises(RecipeFault, match="secrets sets RANK, which the job script"):
        recipes.load(str(path), ["~env", "+secrets=[RANK]"])


def test_every_variable_that_the_scripts_set_is_owned_or_may_be_set():
    """A variable that is read with a default, ${X:-...}, is the user's to set."""
    folder = paths.REPO_ROOT
    files = [*folder.glob("templates/*.j2"), *folder.glob("slurm/*.sh")]
    files.remove(folder / "slurm" / "node_check.sh")
    text = "\n".join(path.read_text() for path in files)
    assigned = set(re.findall(r"(?:^|[\s;(])([A-Z][A-Z0-9_]*)=", text))
    users = set(re.findall(r"\$\{([A-Z][A-Z0-9_]*):-", text))
    # PATH is extended; the others are defaults that a recipe may replace.
    allowed = {"PATH", "HF_HOME", "NCCL_SOCKET_IFNAME", "TORCH_NCCL_DUMP_ON_TIMEOUT"}
    allowed |= {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}
    left = assigned - set(owned_variables(assigned)) - users - allowed
    assert not left, left
    assert owned_variables(["NCCL_DEBUG", "OMP_NUM_THREADS", "MY_NODES"]) == []


# A run that goes on --------------------------------------------------------------------------


def test_a_local_process_that_is_gone_is_failed_and_resumes(root, user: Kit):
    path = project(root, "import time; time.sleep(600)\n", **BY_SHELL)
    job, folder = user.submit("--recipe", str(path), "--local", "--nodes", "1")
    run = Run(folder)
    until(lambda: run.status, 30, lambda: report(folder))
    shown = user.cookbook("status", folder.name).stdout
    assert shown.startswith(f"{folder.name} RUNNING: on this host, without Slurm")
    os.killpg(int(job.removeprefix("local-")), signal.SIGKILL)
    told = user.wait(folder, "FAILED")
    gone = "its process is gone, it ended without a final state (killed?)"
    assert told["detail"] == f"{gone}; continue with: cookbook resume {folder.name}"
    resumed = user.cookbook("resume", folder.name)
    assert f"resumed {folder.name} as process " in resumed.stdout, resumed.stderr
    until(lambda: run.status["job_id"] == run.job_id != job, 30, lambda: report(folder))
    done = user.cookbook("cancel", folder.name).stdout
    assert f"cancelled {folder.name} (process " in done
    told = user.status(folder)
    assert (told["state"], told["detail"]) == ("CANCELLED", "by cookbook cancel")


def test_a_change_in_the_checkout_reaches_no_run(root, plain_env, tmp_path, monkeypatch):
    run, said = made(root, "raise SystemExit('failed')\n"), []
    own = code.of_run(run.path)
    recipe_file = root / "code" / "mine.yaml"
    run.write("submission.json", {"recipe": "mine", "recipe_file": str(recipe_file), "jobs": []})
    assert by_bash(run, plain_env) == 1
    changed = shutil.copytree(own.folder, tmp_path / "checkout")
    with (changed / "slurm" / "supervise.sh").open("a") as file:
        file.write("say 'the new code'\n")
    (changed / "origin.json").unlink()
    monkeypatch.setattr(paths, "REPO_ROOT", changed)

    def ended(jobs: int) -> bool:
        return len(run.attempts) == jobs and state_of(run).ended

    resume(run, choose(True), say=said.append)
    until(lambda: ended(2), 60, lambda: report(run.path))
    assert (
        f"continues with its own code, {own.title}; for the current code: cookbook resume"
        in said[0]
    )
    assert "the new code" not in log(run) and run.jobs[-1]["code"] == own.sha256
    resume(run, choose(True), Changes(Site(name="site"), code=True), said.append)
    until(lambda: ended(3), 60, lambda: report(run.path))
    new = code.of_run(run.path)
    assert said[1] == f"code: {new.title}, was {own.title}"
    assert "the new code" in log(run) and run.jobs[-1]["code"] == new.sha256 != own.sha256
    assert run.jobs[-1]["changes"] == ["--code=current"]
    shutil.rmtree(new.folder)
    with pytest.raises(RunFault, match=r"was removed .* --code current"):
        resume(run, choose(True))
