"""slurm/dev-cluster/cluster.py: real jobs, emulated GPUs, several clusters, nothing left behind."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SlurmCluster
from tests.launcher.kit import until

CLUSTER_PY = Path(__file__).parents[2] / "slurm" / "dev-cluster" / "cluster.py"
JOB_SCRIPT = """#!/bin/bash
echo "batch $SLURM_CONF home=$HOME secret=${SECRET:-none}"
srun --ntasks-per-node=1 bash -c 'echo "step $SLURMD_NODENAME $SLURM_CONF"'
"""


def cluster_py(
    *arguments: str | Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [CLUSTER_PY, *arguments], env=env, capture_output=True, text=True, timeout=90
    )


def processes_of(state: Path) -> dict[int, str]:
    """Processes with the state folder in their arguments, environment or working directory."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
            cwd = os.readlink(process / "cwd")
        except OSError:
            continue
        if int(process.name) != os.getpid() and f"{state}/" in f"{text.decode('latin1')}\n{cwd}/":
            found[int(process.name)] = text.split(b"\0")[0].decode("latin1")
    return found


@pytest.mark.parametrize(
    ("options", "accepted"),
    [
        (["--nodes=2", "--gpus-per-node=8", "--cpus-per-task=128", "--mem=1500G"], True),
        (["--nodes=2", "--gres=gpu:h100:8", "--time=6-00:00:00"], True),
        (["--nodes=1", "--gpus-per-node=9"], False),
        (["--nodes=1", "--gres=gpu:a100:1"], False),
        (["--nodes=1", "--partition=absent"], False),
    ],
)
def test_sbatch_test_only_answers_like_a_gpu_cluster(
    slurm, options: list[str], accepted: bool
) -> None:
    answer = slurm.run(["sbatch", "--test-only", *options, "--wrap=true"])
    assert (answer.returncode == 0) is accepted, answer.stderr


def at_rest(cluster: SlurmCluster) -> dict[int, str]:
    """The processes of a cluster, once no job of an earlier test is ending."""
    ending = ("slurmstepd", "bash", "sleep")

    def there() -> str:
        found = processes_of(cluster.state).items()
        return ", ".join(f"{pid} {name}" for pid, name in found if name.startswith(ending))

    until(lambda: not there(), 60, there)
    return processes_of(cluster.state)


def test_down_stops_only_its_own_cluster(slurm, cluster_root: Path, new_cluster) -> None:
    before = at_rest(slurm)
    with new_cluster("other", "--nodes", "1", "--gpus", "2") as other:
        # A process does not belong to the cluster because of its arguments or its SLURM_CONF.
        bystander = subprocess.Popen(["sleep", "600"], env=other.env)
        named = subprocess.Popen(
            ["tail", "-f", other.state / "slurm.conf"], stdout=subprocess.DEVNULL
        )
        try:
            assert other.run(["srun", "hostname"]).returncode == 0
            down = cluster_py("down", "--name", "other", "--state", cluster_root)
            assert (down.returncode, down.stderr) == (0, "cluster 'other' is down\n")
            assert bystander.poll() is None
            assert named.poll() is None
        finally:
            for process in (bystander, named):
                process.kill()
                process.wait()
    assert processes_of(slurm.state) == before
    nodes = slurm.run(["srun", "--nodes=2", "printenv", "SLURMD_NODENAME"])
    assert sorted(nodes.stdout.split()) == ["n1", "n2"], nodes.stderr


def test_a_second_up_changes_nothing(slurm) -> None:
    options = ["--name", slurm.name, "--state", slurm.root]
    before = at_rest(slurm)
    again = cluster_py("up", *options, "--requeue-delay", "5")
    assert (again.returncode, again.stdout) == (0, "")
    assert again.stderr == "cluster 'tests' is already up: nodes=2 gpus=8 requeue-delay=5\n"
    other_shape = cluster_py("up", *options, "--nodes", "3")
    assert other_shape.returncode == 1
    assert f"first: {CLUSTER_PY} down --name tests --state {slurm.root}" in other_shape.stderr
    assert processes_of(slurm.state) == before


def test_an_interrupted_up_leaves_no_process(cluster_root: Path, tmp_path: Path) -> None:
    # A node starts once the signal is sent, so that this is never too late.
    slurmd, asked, sent = (tmp_path / name for name in ("slurmd", "asked", "sent"))
    path = f"{os.environ['PATH']}:/usr/local/sbin:/usr/sbin:/sbin"
    wait = f"touch {asked}; until [ -e {sent} ]; do sleep 0.05; done"
    case = f'case "$*" in *"-N "*) {wait} ;; esac'  # not if it is asked for its version
    slurmd.write_text(f'#!/bin/sh\n{case}\nexec {shutil.which("slurmd", path=path)} "$@"\n')
    slurmd.chmod(0o755)
    # What was ignored when it started, as HUP is below nohup, stays ignored.
    up = subprocess.Popen(
        ["env", "--default-signal=HUP", CLUSTER_PY, "up", "--state", cluster_root],
        env=os.environ | {"PATH": f"{tmp_path}:{path}"},
        stderr=subprocess.PIPE,
        text=True,
    )
    until(asked.exists, 20)
    up.send_signal(signal.SIGHUP)
    sent.touch()
    _, message = up.communicate(timeout=60)
    assert (up.returncode, "interrupted" in message) == (1, True), message
    assert processes_of(cluster_root) == {}


def test_down_ends_jobs_and_leaves_nothing_behind(
    cluster_root: Path, tmp_path: Path, new_cluster
) -> None:
    stubborn = 'trap "" TERM; setsid sleep 600 & touch started; sleep 600'
    with new_cluster("full") as cluster:
        options = ["--nodes=2", "--exclusive", "--output=/dev/null"]
        for _ in range(2):
            slurm_job = cluster.run(["sbatch", *options, f"--wrap={stubborn}"], cwd=tmp_path)
            assert slurm_job.returncode == 0, slurm_job.stderr
        waiting = subprocess.Popen(
            ["srun", "--nodes=2", "true"], env=cluster.env, stderr=subprocess.DEVNULL
        )
        until((tmp_path / "started").exists, 20)
        down = cluster_py("down", "--name", "full", "--state", cluster_root)
        assert down.returncode == 0, down.stderr
        assert waiting.wait(timeout=20) != 0
    until(lambda: not processes_of(cluster_root), 1)
    assert [entry.name for entry in cluster_root.iterdir()] == [".lock"]
    again = cluster_py("down", "--name", "full", "--state", cluster_root)
    assert again.returncode == 0
    assert "is not up" in again.stderr


def test_a_failed_start_shows_the_log_and_stops_its_processes(
    cluster_root: Path, new_cluster
) -> None:
    up = cluster_py("up", "--state", cluster_root, "--set", "SelectType=select/absent")
    assert up.returncode == 1
    assert "end of slurmctld.log:" in up.stderr
    assert "fatal: " in up.stderr
    assert "select/absent" in up.stderr
    assert processes_of(cluster_root) == {}
    with new_cluster("default", "--nodes", "1"):
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no command: give up, down, status or env (see cluster.py --help)"),
        (["start"], "unknown command 'start' (see cluster.py --help)"),
        (["up", "--nodes"], "--nodes needs a value (see cluster.py up --help)"),
        (["up", "--gpus", "8; id"], "--gpus must be a whole number from 0 to 64, got '8; id' (see"),
        (["down", "--name", "../x"], "--name must be lower-case letters, digits and '-', got '../"),
        (["env", "--nodes", "2"], "--nodes is an option of 'up', not of 'env' (see cluster.py env"),
        (["status", "--state", "/a b"], "--state must be a path of letters, digits and '/._@+-',"),
        (["up", "--set", "A=2\nB=x"], "--set must be KEY=VALUE as in slurm.conf, got 'A=2\nB=x'"),
    ],
)
def test_wrong_usage_exits_with_2_and_names_the_fault(arguments: list[str], message: str) -> None:
    answer = cluster_py(*arguments)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.startswith(f"cluster.py: {message}")


def test_a_state_folder_that_cannot_be_used_is_refused_and_not_changed(cluster_root: Path) -> None:
    closed, shared, foreign = (cluster_root / name for name in ("closed", "shared", "foreign"))
    for folder, mode in ((closed, 0o700), (shared, 0o777), (foreign, 0o711)):
        folder.mkdir()
        folder.chmod(mode)
    owner = "nobody"
    if os.geteuid() == 0:
        os.chown(foreign, 65534, 65534)
    else:
        foreign, owner = Path("/usr"), "root"
    for folder, fault in (
        (closed / "state", f'execute permissions for all required on "{closed}"'),
        (shared, f'world-writable permissions without sticky bit set on "{shared}"'),
        (cluster_root / ("x" * 60), "is too long for unix sockets"),
        (foreign, f"belongs to {owner}, not to you"),
    ):
        up = cluster_py("up", "--state", folder)
        assert up.returncode == 1 and fault in up.stderr
    work = cluster_root / "work" / "thesis.tex"
    work.parent.mkdir()
    work.write_text("dear")
    for command in ("up", "down"):
        answer = cluster_py(command, "--name", "work", "--state", cluster_root)
        assert answer.returncode == 1 and "is not a cluster's state folder" in answer.stderr
    assert work.read_text() == "dear" and processes_of(cluster_root) == {}


def test_env_and_status_without_a_cluster_say_how_to_start_one(cluster_root: Path) -> None:
    remedy = f"to start it: {CLUSTER_PY} up --name default --state {cluster_root}\n"
    for command in ("env", "status"):
        answer = cluster_py(command, "--state", cluster_root)
        assert (answer.returncode, answer.stdout) == (1, "")
        assert answer.stderr.endswith(remedy)


def test_missing_slurm_names_the_packages_to_install(
    cluster_root: Path, tmp_path: Path, plain_env
) -> None:
    (tmp_path / "python3").symlink_to(sys.executable)
    env = plain_env | {"PATH": str(tmp_path)}
    hint = "as root: apt-get install slurm-wlm munge"
    up = cluster_py("up", "--state", cluster_root, env=env)
    assert up.returncode == 1
    assert "sbatch" in up.stderr
    assert up.stderr.endswith(f"{hint}\n")


def test_an_ordinary_user_runs_a_cluster(cluster_root: Path, plain_env) -> None:
    # A checkout may be closed to other users; the script needs only its own folder.
    script = shutil.copytree(CLUSTER_PY.parent, cluster_root / "dev-cluster") / CLUSTER_PY.name
    state = cluster_root / "user"
    state.mkdir(mode=0o711)
    as_user: list[str] = []
    if os.geteuid() == 0:
        os.chown(state, 65534, 65534)
        as_user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    env = plain_env | {
        "SECRET": "leaked",
        "HOME": str(state),
        "PATH": "/usr/local/bin:/usr/bin:/bin",
    }

    def user_runs(*argv: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*as_user, *argv], env=env, cwd=cluster_root, capture_output=True, text=True, timeout=90
        )

    up = user_runs(script, "up", "--state", state)
    try:
        assert up.returncode == 0, up.stderr
        (conf,) = state.glob("default/slurm.conf")
        env["SLURM_CONF"] = str(conf)
        job = state / "job.sh"
        job.write_text(JOB_SCRIPT)
        sbatch = ["sbatch", "--wait", "--nodes=2", "--gpus-per-node=8", f"--chdir={state}"]
        submitted = user_runs(*sbatch, "--export=HOME,PATH,USER", "--output=out", job)
        assert submitted.returncode == 0, submitted.stderr
        batch, *steps = (state / "out").read_text().splitlines()
        assert batch == f"batch {conf} home={state} secret=none"
        assert sorted(steps) == [f"step n1 {conf}", f"step n2 {conf}"]
        owners = {os.stat(f"/proc/{pid}").st_uid for pid in processes_of(state)}
        assert owners == {state.stat().st_uid}
    finally:
        del env["SLURM_CONF"]
        down = user_runs(script, "down", "--state", state)
    assert down.returncode == 0, down.stderr
    assert processes_of(state) == {}
