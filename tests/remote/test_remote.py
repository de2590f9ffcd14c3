"""cookbook --host, through a real sshd, and rsync."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from launcher.errors import RemoteFault, UsageFault
from launcher.remote import client
from launcher.run.directory import Run
from tests.remote import kit
from tests.remote.kit import Cluster

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        kit.SSHD is None or shutil.which("rsync") is None,
        reason="sshd or rsync is not installed: bash setup.sh --test-all installs them",
    ),
]
RECIPE = "extends: demo\ndescription: mine\ndataset: {data_files: my.jsonl}\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    with kit.cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture
def project(tmp_path) -> Path:
    """A working tree of the user's, with work that is not committed."""
    folder = tmp_path / "project"
    (folder / "sub").mkdir(parents=True)
    subprocess.run(["git", "init", "-q", folder], check=True)
    (folder / ".gitignore").write_text("my.jsonl\nbig/\n")
    (folder / "mine.yaml").write_text(RECIPE)
    (folder / "my.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    (folder / "train.py").write_text(f"print({os.urandom(4).hex()!r})\n")
    return folder


@pytest.fixture
def run(cluster) -> Run:
    """A run of the cluster with a model of 6 MiB and a log."""
    made = Run(cluster.root / "runs" / f"20261122-151728-demo-{os.urandom(2).hex()}")
    logs = made.path / "logs" / "0"
    logs.mkdir(parents=True)
    (made.path / "logs" / "latest").symlink_to("0")
    (made.path / "export").mkdir()
    (made.path / "export" / "model.safetensors").write_bytes(os.urandom(6 * 2**20))
    (made.path / "export" / "config.json").write_text("{}")
    asked = {"nodes": 1, "gpus_per_node": 1}
    made.write("submission.json", {"recipe": "demo", "jobs": [{"job_id": "7"}], "asked": asked})
    made.write("status.json", {"job_id": "7", "state": "RUNNING", "attempt": 0, "started": 1.0})
    (logs / "node_0.log").write_text("first\n")
    return made


def test_one_authentication_serves_all_commands(cluster, project):
    cluster.hang_up()
    before = cluster.authentications
    done = cluster.cookbook("status", "--json", cwd=project)
    assert done.returncode == 0 and json.loads(done.stdout) == [], done.stderr
    for command in (["status"], ["submit", "mine.yaml", "--dry-run"]):
        assert cluster.cookbook(*command, cwd=project).returncode == 0
    assert cluster.authentications == before + 1


def test_a_connection_that_died_is_opened_again(cluster, project):
    """Its socket is left, as by a laptop that was switched off."""
    pid = re.search(r"pid=(\d+)", cluster.ssh("-O", "check", "cluster").stderr)
    os.kill(int(pid[1]), signal.SIGKILL)
    assert (cluster.folder / "cm").exists()
    assert cluster.cookbook("status", cwd=project).returncode == 0
    assert cluster.ssh("-O", "check", "cluster").returncode == 0


def test_faults_and_exit_codes_are_those_of_the_cluster(cluster, project, monkeypatch):
    done = cluster.cookbook("submit", "dmeo", cwd=project)
    assert (done.returncode, done.stdout) == (2, "") and "did you mean demo?" in done.stderr
    done = cluster.cookbook("statsu", cwd=project)
    assert done.returncode == 2 and "did you mean status?" in done.stderr
    monkeypatch.setattr(kit, "HOST", "cluster:nowhere")
    done = cluster.cookbook("status", cwd=project)
    assert done.returncode == 1 and "cookbook init --host cluster:nowhere" in done.stderr


def test_the_tree_is_sent_once_and_as_it_is(cluster, project):
    (project / "data.bin").write_bytes(os.urandom(11 * 2**20))
    elsewhere = project.parent / "other.jsonl"
    elsewhere.write_text(f'{{"prompt": "a", "response": "{os.urandom(4).hex()}"}}\n')
    dry = ["submit", "../mine.yaml", "--dry-run", f"dataset_val.data_files={elsewhere}"]
    trees = kit.paths.sent(cluster.root) / "trees"

    def sent() -> set[Path]:
        done = cluster.cookbook(*dry, cwd=project / "sub")
        assert done.returncode == 0, done.stderr
        assert "not sent: data.bin (above 10 MiB" in done.stderr
        # A message ends with the user's own path, below the folder of what was sent.
        for file in (f"{project}/sub/../my.jsonl", f"{project}/sub/../../other.jsonl"):
            assert f"{file} has no column" in done.stderr, done.stderr
        return {path for path in trees.glob(f"[!l]*{project}/train.py")}

    first = sent()
    assert sent() == first
    before = (project / "train.py").read_text()
    (project / "train.py").write_text("print(2)\n")
    second = sent()
    assert len(second) == len(first) + 1
    (new,) = second - first
    assert new.read_text() == "print(2)\n" and before in [path.read_text() for path in first]
    # What did not change lies there once.
    assert (new.parent / "my.jsonl").stat().st_nlink == 2
    assert (new.parents[1] / "other.jsonl").is_file()
    # Only what was sent is private: the models and data of the command are for the group too.
    modes = [folder.stat().st_mode & 0o777 for folder in (cluster.root, project / "sub")]
    assert modes[0] == modes[1] and kit.paths.sent(cluster.root).stat().st_mode & 0o777 == 0o700


def test_files_come_and_continue_and_no_link_does(cluster, project, run):
    export, secret = run.path / "export", project.parent / "secret"
    (export / "evil").symlink_to(secret)
    (export / "folder").symlink_to(project.parent)
    done = cluster.cookbook("fetch", run.name, cwd=project)
    assert done.returncode == 0 and done.stdout == f"{run.name}\n", done.stderr
    here = project / run.name / "export"
    assert sorted(each.name for each in here.iterdir()) == ["config.json", "model.safetensors"]
    (export / "config.json").write_text('{"a": 1}')
    weights = here / "model.safetensors"
    before = weights.stat().st_ino
    done = cluster.cookbook("fetch", run.name, cwd=project)
    assert (here / "config.json").read_text() == '{"a": 1}', done.stderr
    assert weights.stat().st_ino == before, "it was sent again"
    done = cluster.cookbook("fetch", run.name, "--adapter", cwd=project)
    assert done.returncode == 1 and 'export/adapter" failed: No such file' in done.stderr


def test_a_hostile_cluster_writes_nowhere_else(tmp_path):
    """Its ssh answers what it likes: names of runs, and rsync's protocol with links and paths."""
    home, work = tmp_path / "home", tmp_path / "work"
    for folder in (home / ".ssh", work, tmp_path / "served" / "sub"):
        folder.mkdir(parents=True)
    key = home / ".ssh" / "authorized_keys"
    key.write_text("mine")
    (tmp_path / "served" / "authorized_keys").write_text("attacker")
    (tmp_path / "served" / "sub" / "link").symlink_to(home)
    fake = tmp_path / "ssh"
    # The second of its answers has paths with .., by rsync's own option.
    fake.write_text(f"""#!/bin/bash
case "$*" in
  *-G*) echo "controlpath none"; exit 0;;
  *" status "*) printf '{{"run": "%s", "path": "/x"}}' "$EVIL_RUN"; exit 0;;
  *--server*) cd {tmp_path}/served; exec rsync --server --sender $EVIL_HOW;;
esac
""")
    fake.chmod(0o755)
    env = {**os.environ, "HOME": str(home), "COOKBOOK_SSH": str(fake)}
    env["PYTHONPATH"] = str(kit.paths.REPO_ROOT)
    argv = [sys.executable, "-m", "launcher", "--host", "evil", "fetch", "last"]

    def fetched(name: str, how: str) -> str:
        done = subprocess.run(
            argv, cwd=work, env={**env, "EVIL_RUN": name, "EVIL_HOW": how}, capture_output=True
        )
        assert key.read_text() == "mine"
        assert sorted(path.name for path in home.rglob("*")) == [".ssh", "authorized_keys"]
        return done.stderr.decode()

    plain = "-tre.LsfxCIvu . ./"
    for name in (str(home / ".ssh"), "../home/.ssh", "..", ".ssh", "-e"):
        assert "which is no folder's name" in fetched(name, plain)
    assert not list(work.iterdir())
    fetched("good", plain)
    assert (work / "good/export/authorized_keys").read_text() == "attacker"
    fetched("bad", "-tlRre.LsfxCIvu . ../home/.ssh/../../served/authorized_keys")
    assert not [path for path in work.rglob("*") if path.is_symlink()]


def test_on_a_terminal_ssh_passes_ctrl_c_and_the_size(cluster, project, run):
    """A live view, its end by Ctrl-C, and nothing that ssh adds."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(project)
        argv = [sys.executable, "-m", "launcher", "--host", kit.HOST, "watch", run.name]
        os.execve(sys.executable, argv, {**cluster.env, "PYTHONPATH": str(kit.paths.REPO_ROOT)})
    shown = b""
    while run.name.encode() not in shown:
        shown += os.read(terminal, 2**16)
    os.write(terminal, b"\x03")
    with suppress(OSError):  # the terminal has no user any more
        while data := os.read(terminal, 2**16):
            shown += data
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert b"the run continues" in shown and b"onnection to" not in shown
    assert _ends(f"launcher watch {run.name}")


def test_a_lost_connection_ends_the_command_there_and_not_the_run(cluster, project, run):
    process = cluster.start("watch", run.name, cwd=project)
    assert process.stderr and process.stderr.read(1)
    pid = re.search(r"pid=(\d+)", cluster.ssh("-O", "check", "cluster").stderr)
    os.kill(int(pid[1]), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and b"was lost: runs there go on" in err
    assert _ends(f"launcher watch {run.name}") and run.status["state"] == "RUNNING"


def _ends(words: str) -> bool:
    """Whether no process has these words any more, within a time that is enough."""
    deadline = time.monotonic() + 60
    while subprocess.run(["pgrep", "-f", words], capture_output=True).stdout:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_a_recipe_and_a_report_come_to_this_machine(cluster, project, run):
    done = cluster.cookbook("report", run.name, "-o", "../r.html", cwd=project)
    assert done.returncode == 0, done.stderr
    assert run.name in (project.parent / "r.html").read_text()
    trees = kit.paths.sent(cluster.root) / "trees"
    assert not list(trees.rglob("*.html"))


def test_init_copies_sets_up_and_checks(cluster, tmp_path, monkeypatch, capfd):
    """Only setup.sh is a short one, as the kit's takes a minute."""
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path))
    source, there = tmp_path / "source", tmp_path / "my&kit"
    for part in ("configs", "launcher", "runspec", "slurm", "templates"):
        shutil.copytree(kit.paths.REPO_ROOT / part, source / part)
    (source / "setup.sh").write_text('echo "set up with $*" >&2\n')
    (source / "runs.log").write_text("ignored")
    (source / ".gitignore").write_text("*.log\n__pycache__/\n/configs/clusters/default.yaml\n")
    subprocess.run(["git", "init", "-q", source], check=True)
    host, said = f"cluster:{there}", []
    code = client.install(host, source, "cu126", said.append)
    out, err = capfd.readouterr()
    assert "set up with --torch cu126" in err and said[0] == f"copied the kit to {host}"
    # There is no Slurm behind these login nodes, which both say.
    assert code == 1 and "Slurm" in out
    assert (there / "launcher/remote/sent.py").is_file() and not (there / "runs.log").exists()
    assert f"export COOKBOOK_HOST={host}" in said[-1]
    (source / "setup.sh").write_text("exit 3\n")
    (source / "launcher/remote/sent.py").unlink()
    (there / "configs/recipes/own.yaml").write_text("extends: demo\n")
    with pytest.raises(RemoteFault, match=r"setup\.sh failed on cluster"):
        client.install(host, source, None, said.append)
    assert not (there / "launcher/remote/sent.py").exists()
    assert (there / "configs/recipes/own.yaml").is_file()
    (there / ".git").mkdir()
    for other, fault in (
        (host, "is a git checkout: use git pull there"),
        (f"cluster:{source}/setup.sh", "mkdir: cannot create directory"),
        ("cluster.invalid", "Could not resolve hostname cluster.invalid"),
    ):
        with pytest.raises((RemoteFault, SystemExit)):
            client.install(other, source, None, said.append)
        assert fault in capfd.readouterr().err
    with pytest.raises(UsageFault, match="this is none"):
        client.install(host, tmp_path, None, said.append)
